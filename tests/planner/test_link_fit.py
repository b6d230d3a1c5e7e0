"""Link fits from message times, and the files that keep measured links."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.hardware import LINKS, make_machine
from raytrain_hpc.planner.link_fit import BUS_FACTORS, CollectiveTimings, compute_bus_gbs, fit_link
from raytrain_hpc.planner.measured_links import MeasuredLinks, derive_links, load_saved_links, save_links

SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 24)


def make_seconds(operation: str, ranks: int, alpha: float, gbs: float) -> dict[int, float]:
    return {size: alpha + BUS_FACTORS[operation](ranks) * size / (gbs * 1e9) for size in SIZES}


@pytest.mark.parametrize("operation", BUS_FACTORS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_exact_timings_are_fitted_exactly(operation: str, ranks: int) -> None:
    fitted = fit_link(operation, ranks, make_seconds(operation, ranks, 2e-5, 12.5))
    assert (fitted.alpha_s, fitted.gbs) == pytest.approx((2e-5, 12.5), rel=1e-9) and fitted.error < 1e-9


def test_the_fit_is_least_squares_of_relative_errors() -> None:
    rng = random.Random(3)
    seconds = {size: time * rng.uniform(0.8, 1.25) for size, time in make_seconds("all_reduce", 4, 1e-4, 2.0).items()}
    rows = np.array([[1 / time, size / time] for size, time in seconds.items()])
    (alpha, beta), *_ = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)
    fitted = fit_link("all_reduce", 4, seconds)
    assert (fitted.alpha_s, fitted.gbs) == pytest.approx((alpha, 1.5 / beta / 1e9), rel=1e-9)
    assert fitted.error == pytest.approx(max(abs(rows @ (alpha, beta) - 1)), rel=1e-9)


def test_noise_gives_no_negative_latency_or_bandwidth() -> None:
    assert fit_link("send", 2, {1000: 1e-6, 2000: 9e-6}).alpha_s == 0
    assert fit_link("send", 2, {1000: 9e-6, 2000: 1e-6}).gbs == float("inf")
    with pytest.raises(ValueError):
        fit_link("send", 2, {1000: 1e-6})


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """nccl-tests, PERFORMANCE.md: all-reduce 2(n-1)/n, all-gather, reduce-scatter and all-to-all (n-1)/n, others 1."""
    assert compute_bus_gbs("all_reduce", 8, 1e9, 1.0) == pytest.approx(1.75)
    assert compute_bus_gbs("all_gather", 8, 1e9, 1.0) == pytest.approx(0.875)
    assert compute_bus_gbs("broadcast", 8, 1e9, 1.0) == pytest.approx(1.0)


def make_timings(scope: str, ranks: int, nodes: int, gbs: float) -> CollectiveTimings:
    efficiencies = {"all_reduce": 0.8, "all_gather": 0.5, "reduce_scatter": 0.3}
    return CollectiveTimings(
        scope,
        ranks,
        nodes,
        {name: make_seconds(name, ranks, 1e-5, gbs * efficiencies.get(name, 1)) for name in BUS_FACTORS},
    )


def test_plans_use_the_measured_links(tmp_path: Path) -> None:
    links = derive_links(
        [make_timings("inside a node", 4, 1, 100.0), make_timings("across nodes", 4, 4, 10.0)], "2026-01-02"
    )
    save_links("h100", links, tmp_path)
    save_links("cpu", derive_links([make_timings("inside a node", 2, 1, 1.0)], "2026-01-03"), tmp_path)
    saved = load_saved_links("h100", tmp_path)
    assert saved == links and load_saved_links("a100", tmp_path) is None
    assert saved is not None and saved.inside is not None and saved.across is not None
    assert (saved.inside.gbs, saved.inside.all_reduce, saved.inside.gather) == (
        pytest.approx(100.0),
        pytest.approx((0.8,)),
        pytest.approx((0.4,)),
    )
    reference, across = LINKS["infiniband-ndr"], saved.across
    assert across.get_efficiency("all_reduce", 1) == pytest.approx(0.8), "at the measured number of nodes"
    for nodes in (0, 2, 5):
        ratio = across.get_efficiency("all_reduce", nodes) / across.get_efficiency("all_reduce", 1)
        assert ratio == pytest.approx(
            reference.get_efficiency("all_reduce", nodes) / reference.get_efficiency("all_reduce", 1)
        )

    planned = make_machine("h100", 4, 8, measured=(saved.inside, saved.across))
    assert (planned.inside, planned.across) == (saved.inside, saved.across)
    named = make_machine("h100", 4, 8, "pcie", "", measured=(saved.inside, saved.across))
    assert (named.inside.name, named.across) == ("pcie", saved.across), (
        "a named link takes precedence over a measured one"
    )
    # The measured message takes the measured time.
    assert planned.estimate_transfer_s(1 << 24, across=True) == pytest.approx(1e-5 + (1 << 24) / 10e9, rel=0.05)


def test_links_that_are_not_measured_again_are_kept(tmp_path: Path) -> None:
    both = derive_links([make_timings("inside a node", 4, 1, 100.0), make_timings("across nodes", 4, 4, 10.0)], "d1")
    inside = derive_links([make_timings("inside a node", 4, 1, 50.0)], "d2")
    across = derive_links([make_timings("across nodes", 4, 4, 20.0)], "d3")
    save_links("h100", both, tmp_path)
    save_links("h100", inside, tmp_path)
    assert load_saved_links("h100", tmp_path) == MeasuredLinks("d2", inside.inside, both.across)
    save_links("h100", across, tmp_path)
    assert load_saved_links("h100", tmp_path) == MeasuredLinks("d3", inside.inside, across.across)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"h100": {}}', '{"h100": {"day": "x", "inside": {"name": 3}, "across": null}}']
)
def test_a_damaged_file_is_named_in_the_error(content: str, tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(content)
    with pytest.raises(ConfigError, match=r"links.json.*measure again"):
        load_saved_links("h100", tmp_path)


def test_a_file_without_a_json_object_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError):
        save_links("cpu", derive_links([make_timings("inside a node", 2, 1, 1.0)], "d"), tmp_path)
