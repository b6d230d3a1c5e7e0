"""Measured links and calibrations of the user's own cluster: saved in the cache and used by every later plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2
from pathlib import Path
from typing import Any

from raytrain_hpc.cache_dir import get_cache_dir
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.hardware import LINKS, Link
from raytrain_hpc.planner.link_fit import CollectiveTimings, fit_operations

_LINKS_FILE, _CALIBRATIONS_FILE = "links.json", "calibration.json"  # in the cache directory
_MIN_LATENCY_S = 1e-7  # a fit may give 0


@dataclass(frozen=True)
class MeasuredLinks:
    """Measured links between devices of one name, each None if not measured. `day`: date of the last measurement."""

    day: str
    inside: Link | None
    across: Link | None


def derive_links(all_timings: Sequence[CollectiveTimings], day: str) -> MeasuredLinks:
    """Derive the links from timings among workers of one node and among one worker per node."""
    link_by_scope = {timings.scope: _derive_link(timings, day) for timings in all_timings}
    return MeasuredLinks(day, link_by_scope.get("inside a node"), link_by_scope.get("across nodes"))


def _derive_link(timings: CollectiveTimings, day: str) -> Link:
    """Derive a link: point-to-point messages give latency and bandwidth, collectives the efficiency.

    Across nodes the efficiency is measured at one number of nodes; for other numbers it is scaled from InfiniBand's.
    """
    fits = fit_operations(timings)
    send_fit, gather_gbs = fits["send"], [fits[name].gbs for name in ("all_gather", "reduce_scatter")]
    measured_efficiencies = fits["all_reduce"].gbs / send_fit.gbs, sum(gather_gbs) / 2 / send_fit.gbs
    if timings.scope == "inside a node":
        curves: list[tuple[float, ...]] = [(measured_efficiency,) for measured_efficiency in measured_efficiencies]
    else:
        reference = LINKS["infiniband-ndr"]
        doublings = log2(timings.nodes) - 1
        reference_efficiencies = (
            reference.get_efficiency("all_reduce", doublings),
            reference.get_efficiency("gather", doublings),
        )
        curves = [
            tuple(measured_efficiency * efficiency / reference_efficiency for efficiency in curve)
            for measured_efficiency, reference_efficiency, curve in zip(
                measured_efficiencies, reference_efficiencies, (reference.all_reduce, reference.gather), strict=True
            )
        ]
    return Link(f"measured {day}", send_fit.gbs, max(send_fit.alpha_s, _MIN_LATENCY_S), *curves)


def load_links(device: str) -> tuple[Link | None, Link | None]:
    """Return the measured links within a node and across nodes, each None if unknown. Raises ConfigError."""
    links = load_saved_links(device)
    return (None, None) if links is None else (links.inside, links.across)


def save_links(device: str, links: MeasuredLinks, directory: Path | None = None) -> Path:
    """Save measured links for a device, by default in the cache.

    Other devices are kept, and so is an earlier link where the new one is None: on one node, none across nodes is
    measured. Raises OSError, and ConfigError for a damaged file.
    """
    earlier = load_saved_links(device, directory)
    if earlier is not None:
        links = replace(links, inside=links.inside or earlier.inside, across=links.across or earlier.across)
    return _save((directory or get_cache_dir()) / _LINKS_FILE, device, asdict(links))


def save_calibration(device: str, calibration: Calibration, directory: Path | None = None) -> Path:
    """Save the calibration for a device, by default in the cache. Other devices are kept. Raises OSError."""
    return _save((directory or get_cache_dir()) / _CALIBRATIONS_FILE, device, asdict(calibration))


def load_calibration(device: str, directory: Path | None = None) -> Calibration:
    """Return the saved calibration for a device, else the default. Raises ConfigError for a damaged file."""
    path = (directory or get_cache_dir()) / _CALIBRATIONS_FILE
    saved = _load(path).get(device, {})
    try:
        return Calibration(**{name: float(value) for name, value in saved.items()})
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError("calibration", device, str(path), "damaged; delete it and measure again") from error


def load_saved_links(device: str, directory: Path | None = None) -> MeasuredLinks | None:
    """Return the saved links for a device, or None. Raises ConfigError for a damaged file."""
    path = (directory or get_cache_dir()) / _LINKS_FILE
    saved = _load(path).get(device)
    if saved is None:
        return None
    try:
        inside, across = (None if saved[key] is None else _parse_link(saved[key]) for key in ("inside", "across"))
        return MeasuredLinks(saved["day"], inside, across)
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
    saved = _load(path) | {device: values}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(saved, indent=2) + "\n")
    temporary.replace(path)
    return path


def _load(path: Path) -> dict[str, Any]:
    try:
        saved = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError("links", path.name, str(path), "unreadable; delete it and measure again") from error
    if not isinstance(saved, dict):
        raise ConfigError("links", path.name, str(path), "damaged; delete it and measure again (bench comm)")
    return saved
