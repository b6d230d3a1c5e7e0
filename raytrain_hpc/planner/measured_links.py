"""The links of the user's own cluster, as they were measured: kept in a file, and taken for those of every plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log2
from pathlib import Path
from typing import Any

from raytrain_hpc.cache_dir import default_cache
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.hardware import LINKS, Link
from raytrain_hpc.planner.link_fit import Reach, fits

_LINKS, _CALIBRATIONS = "links.json", "calibration.json"  # in the cache
_LEAST_LATENCY_S = 1e-7  # a fit may come out at none


@dataclass(frozen=True)
class Measured:
    """Links between devices of one name; None where there was nothing to measure one on. `day`: of the measurement."""

    day: str
    inside: Link | None
    across: Link | None


def links(reaches: Sequence[Reach], day: str) -> Measured:
    """What was measured among workers of one node, and among one of each node."""
    found = {reach.scope: _link(reach, day) for reach in reaches}
    return Measured(day, found.get("inside a node"), found.get("across nodes"))


def _link(reach: Reach, day: str) -> Link:
    """Messages give latency and bandwidth; what collectives reach of it is measured at one number of nodes, and with
    more or fewer of them goes down as it does elsewhere."""
    found = fits(reach)
    one, gathers = found["send"], [found[name].gbs for name in ("all_gather", "reduce_scatter")]
    shares = found["all_reduce"].gbs / one.gbs, sum(gathers) / 2 / one.gbs
    if reach.scope == "inside a node":
        curves: list[tuple[float, ...]] = [(share,) for share in shares]
    else:
        known = LINKS["infiniband-ndr"]
        at = log2(reach.nodes) - 1
        usual = known.reached("all_reduce", at), known.reached("gather", at)
        curves = [
            tuple(share * point / there for point in curve)
            for share, there, curve in zip(shares, usual, (known.all_reduce, known.gather), strict=True)
        ]
    return Link(f"measured {day}", one.gbs, max(one.alpha_s, _LEAST_LATENCY_S), *curves)


def known(device: str) -> tuple[Link | None, Link | None]:
    """Inside a node and across, those that were measured between such devices. Raises ConfigError."""
    found = recall(device)
    return (None, None) if found is None else (found.inside, found.across)


def remember(device: str, found: Measured, directory: Path | None = None) -> Path:
    """Keep them, in the cache if no other directory is named, beside those of other devices. Raises OSError."""
    return _keep((directory or default_cache()) / _LINKS, device, asdict(found))


def remember_calibration(device: str, found: Calibration, directory: Path | None = None) -> Path:
    """The same for what a machine makes of its work."""
    return _keep((directory or default_cache()) / _CALIBRATIONS, device, asdict(found))


def known_calibration(device: str, directory: Path | None = None) -> Calibration:
    """As it was refitted on such devices, else the default. Raises ConfigError for a file that holds something else."""
    path = (directory or default_cache()) / _CALIBRATIONS
    kept = _read(path).get(device, {})
    try:
        return Calibration(**{name: float(value) for name, value in kept.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError("calibration", device, str(path), "damaged; delete it and measure again") from error


def recall(device: str, directory: Path | None = None) -> Measured | None:
    """Those of this device, if any were measured. Raises ConfigError for a file that holds something else."""
    path = (directory or default_cache()) / _LINKS
    kept = _read(path).get(device)
    if kept is None:
        return None
    try:
        inside, across = (None if kept[key] is None else _restored(kept[key]) for key in ("inside", "across"))
        return Measured(kept["day"], inside, across)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError("links", device, str(path), "damaged; delete it and measure again (bench comm)") from error


def _restored(kept: Mapping[str, Any]) -> Link:
    return Link(
        str(kept["name"]),
        float(kept["gbs"]),
        float(kept["latency_s"]),
        tuple(map(float, kept["all_reduce"])),
        tuple(map(float, kept["gather"])),
    )


def _keep(path: Path, device: str, found: dict[str, Any]) -> Path:
    kept = _read(path) | {device: found}
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(kept, indent=2) + "\n")
    beside.replace(path)
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        kept = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("links", path.name, str(path), "unreadable; delete it and measure again") from error
    if not isinstance(kept, dict):
        raise ConfigError("links", path.name, str(path), "damaged; delete it and measure again (bench comm)")
    return kept
