"""Latency and bandwidth out of seconds, and what is kept of them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.hardware import LINKS, make_machine
from raytrain_hpc.planner.link_fit import BUS_FACTORS, CollectiveTimings, compute_bus_gbs, fit_link
from raytrain_hpc.planner.measured_links import derive_links, load_saved_links, save_links

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


def seconds(operation: str, ranks: int, alpha: float, gbs: float) -> dict[int, float]:
    return {size: alpha + BUS_FACTORS[operation](ranks) * size / (gbs * 1e9) for size in SIZES}


@pytest.mark.parametrize("operation", BUS_FACTORS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_line_is_found_again(operation: str, ranks: int) -> None:
    found = fit_link(operation, ranks, seconds(operation, ranks, 2e-5, 12.5))
    assert (found.alpha_s, found.gbs) == pytest.approx((2e-5, 12.5), rel=1e-9) and found.error < 1e-9


def test_the_line_is_that_of_least_squares_of_relative_errors() -> None:
    noise = random.Random(3)
    took = {size: t * noise.uniform(0.8, 1.25) for size, t in seconds("all_reduce", 4, 1e-4, 2.0).items()}
    rows = np.array([[1 / t, size / t] for size, t in took.items()])
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    found = fit_link("all_reduce", 4, took)
    assert (found.alpha_s, found.gbs) == pytest.approx((alpha, 1.5 / beta / 1e9), rel=1e-9)
    assert found.error == pytest.approx(max(abs(rows @ (alpha, beta) - 1)), rel=1e-9)


def test_noise_gives_no_negative_latency_or_bandwidth() -> None:
    assert fit_link("send", 2, {1000: 1e-6, 2000: 9e-6}).alpha_s == 0
    assert fit_link("send", 2, {1000: 9e-6, 2000: 1e-6}).gbs == float("inf")
    with pytest.raises(ValueError):
        fit_link("send", 2, {1000: 1e-6})


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """PERFORMANCE.md there: all-reduce 2(n-1)/n, all-gather, reduce-scatter and all-to-all (n-1)/n, others 1."""
    assert compute_bus_gbs("all_reduce", 8, 1e9, 1.0) == pytest.approx(1.75)
    assert compute_bus_gbs("all_gather", 8, 1e9, 1.0) == pytest.approx(0.875)
    assert compute_bus_gbs("broadcast", 8, 1e9, 1.0) == pytest.approx(1.0)


def reach(scope: str, ranks: int, nodes: int, gbs: float) -> CollectiveTimings:
    reached = {"all_reduce": 0.8, "all_gather": 0.5, "reduce_scatter": 0.3}
    return CollectiveTimings(
        scope, ranks, nodes, {name: seconds(name, ranks, 1e-5, gbs * reached.get(name, 1)) for name in BUS_FACTORS}
    )


def test_what_was_measured_is_what_plans_take(tmp_path: Path) -> None:
    found = derive_links([reach("inside a node", 4, 1, 100.0), reach("across nodes", 4, 4, 10.0)], "2026-01-02")
    save_links("h100", found, tmp_path)
    save_links("cpu", derive_links([reach("inside a node", 2, 1, 1.0)], "2026-01-03"), tmp_path)
    kept = load_saved_links("h100", tmp_path)
    assert kept == found and load_saved_links("a100", tmp_path) is None
    assert kept is not None and kept.inside is not None and kept.across is not None
    assert (kept.inside.gbs, kept.inside.all_reduce, kept.inside.gather) == (
        pytest.approx(100.0),
        pytest.approx((0.8,)),
        pytest.approx((0.4,)),
    )
    known, across = LINKS["infiniband-ndr"], kept.across
    assert across.get_efficiency("all_reduce", 1) == pytest.approx(0.8), "at the four nodes that were measured"
    for nodes in (0, 2, 5):
        ratio = across.get_efficiency("all_reduce", nodes) / across.get_efficiency("all_reduce", 1)
        assert ratio == pytest.approx(known.get_efficiency("all_reduce", nodes) / known.get_efficiency("all_reduce", 1))

    planned = make_machine("h100", 4, 8, measured=(kept.inside, kept.across))
    assert (planned.inside, planned.across) == (kept.inside, kept.across)
    said = make_machine("h100", 4, 8, "pcie", "", measured=(kept.inside, kept.across))
    assert (said.inside.name, said.across) == ("pcie", kept.across), "what is said goes before what was measured"
    # Seconds of the very message that was measured come out again.
    assert planned.estimate_transfer_s(1 << 24, across=True) == pytest.approx(1e-5 + (1 << 24) / 10e9, rel=0.05)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"h100": {}}', '{"h100": {"day": "x", "inside": {"name": 3}, "across": null}}']
)
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(content)
    with pytest.raises(ConfigError, match=r"links.json.*measure again"):
        load_saved_links("h100", tmp_path)


def test_a_file_that_is_no_object_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError):
        save_links("cpu", derive_links([reach("inside a node", 2, 1, 1.0)], "d"), tmp_path)
