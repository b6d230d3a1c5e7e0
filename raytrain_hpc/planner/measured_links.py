"""The links of the user's own cluster, as they were measured: kept in a file, and taken for those of every plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import Any

from raytrain_hpc.cache_dir import get_cache_dir
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.hardware import LINKS, Link
from raytrain_hpc.planner.link_fit import CollectiveTimings, fit_operations

_LINKS_FILE, _CALIBRATIONS_FILE = "links.json", "calibration.json"  # in the cache
_MIN_LATENCY_S = 1e-7  # a fit may come out at none


@dataclass(frozen=True)
class MeasuredLinks:
    """Links between devices of one name; None where there was nothing to measure one on. `day`: of the measurement."""

    day: str
    inside: Link | None
    across: Link | None


def derive_links(timings: Sequence[CollectiveTimings], day: str) -> MeasuredLinks:
    """What was measured among workers of one node, and among one of each node."""
    found = {reach.scope: _derive_link(reach, day) for reach in timings}
    return MeasuredLinks(day, found.get("inside a node"), found.get("across nodes"))


def _derive_link(timings: CollectiveTimings, day: str) -> Link:
    """Messages give latency and bandwidth; what collectives reach of it is measured at one number of nodes, and with
    more or fewer of them goes down as it does elsewhere."""
    found = fit_operations(timings)
    one, gathers = found["send"], [found[name].gbs for name in ("all_gather", "reduce_scatter")]
    shares = found["all_reduce"].gbs / one.gbs, sum(gathers) / 2 / one.gbs
    if timings.scope == "inside a node":
        curves: list[tuple[float, ...]] = [(share,) for share in shares]
    else:
        known = LINKS["infiniband-ndr"]
        at = log2(timings.nodes) - 1
        usual = known.get_efficiency("all_reduce", at), known.get_efficiency("gather", at)
        curves = [
            tuple(share * point / there for point in curve)
            for share, there, curve in zip(shares, usual, (known.all_reduce, known.gather), strict=True)
        ]
    return Link(f"measured {day}", one.gbs, max(one.alpha_s, _MIN_LATENCY_S), *curves)


def load_links(device: str) -> tuple[Link | None, Link | None]:
    """Inside a node and across, those that were measured between such devices. Raises ConfigError."""
    found = load_saved_links(device)
    return (None, None) if found is None else (found.inside, found.across)


def save_links(device: str, links: MeasuredLinks, directory: Path | None = None) -> Path:
    """Keep them, in the cache if no other directory is named, beside those of other devices. Raises OSError."""
    return _save((directory or get_cache_dir()) / _LINKS_FILE, device, asdict(links))


def save_calibration(device: str, calibration: Calibration, directory: Path | None = None) -> Path:
    """The same for what a machine makes of its work."""
    return _save((directory or get_cache_dir()) / _CALIBRATIONS_FILE, device, asdict(calibration))


def load_calibration(device: str, directory: Path | None = None) -> Calibration:
    """As it was refitted on such devices, else the default. Raises ConfigError for a file that holds something else."""
    path = (directory or get_cache_dir()) / _CALIBRATIONS_FILE
    kept = _load(path).get(device, {})
    try:
        return Calibration(**{name: float(value) for name, value in kept.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError("calibration", device, str(path), "damaged; delete it and measure again") from error


def load_saved_links(device: str, directory: Path | None = None) -> MeasuredLinks | None:
    """Those of this device, if any were measured. Raises ConfigError for a file that holds something else."""
    path = (directory or get_cache_dir()) / _LINKS_FILE
    kept = _load(path).get(device)
    if kept is None:
        return None
    try:
        inside, across = (None if kept[key] is None else _parse_link(kept[key]) for key in ("inside", "across"))
        return MeasuredLinks(kept["day"], inside, across)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError("links", device, str(path), "damaged; delete it and measure again (bench comm)") from error


def _parse_link(fields: Mapping[str, Any]) -> Link:
    return Link(
        str(fields["name"]),
        float(fields["gbs"]),
        float(fields["latency_s"]),
        tuple(map(float, fields["all_reduce"])),
        tuple(map(float, fields["gather"])),
    )


def _save(path: Path, device: str, values: dict[str, Any]) -> Path:
    kept = _load(path) | {device: values}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(kept, indent=2) + "\n")
    beside.replace(path)
    return path


def _load(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("links", path.name, str(path), "unreadable; delete it and measure again") from error
    if not isinstance(kept, dict):
        raise ConfigError("links", path.name, str(path), "damaged; delete it and measure again (bench comm)")
    return kept
