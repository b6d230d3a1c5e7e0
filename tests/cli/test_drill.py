"""Schedule of a fault drill, and its report from a run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from raytrain_hpc.cli.drill import (
    CORRUPTION_KINDS,
    FAULT_KINDS,
    build_report,
    list_kinds,
    make_schedule,
    prepare_for_corruption,
)
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import InjectConfig
from raytrain_hpc.errors import ConfigError


def test_schedule_is_deterministic_and_covers_all_kinds_and_ranks() -> None:
    assert (
        set(FAULT_KINDS) - set(list_kinds("auto", 3))
        == {"network_down"}
        == set(FAULT_KINDS) - set(list_kinds("cpu", 2))
    )
    assert set(list_kinds("cpu", 3)) == set(FAULT_KINDS)
    assert set(list_kinds("cuda", 3)) - set(list_kinds("xpu", 3)) == {"gpu_hang"}
    schedule = make_schedule(7, 100, 2000, 3)
    assert schedule == make_schedule(7, 100, 2000, 3) != make_schedule(8, 100, 2000, 3)
    assert {fault.kind for fault in schedule} == set(FAULT_KINDS) and {fault.rank for fault in schedule} == {0, 1, 2}
    steps = [fault.step for fault in schedule]
    assert steps == sorted(set(steps)) and steps[-1] < 2000
    assert min(b - a for a, b in zip(steps, steps[1:], strict=False)) >= 5
    with pytest.raises(ConfigError, match="train.steps=50 .*10 faults need at least 55 steps"):
        make_schedule(7, 10, 50, 3)


def test_schedule_of_corruption_has_random_bits_and_some_broken_devices() -> None:
    schedule = make_schedule(3, 200, 4000, 3, CORRUPTION_KINDS)
    assert {fault.kind for fault in schedule} == set(CORRUPTION_KINDS)
    assert {fault.bit for fault in schedule if fault.kind == "bitflip_batch"} == {0}
    rounded = {"bitflip_activation", "bitflip_gradient"}
    assert {fault.bit for fault in schedule if fault.kind in rounded} <= set(range(16, 32))
    others = {fault.bit for fault in schedule if fault.kind not in (*rounded, "bitflip_batch")}
    assert min(others) < 4 and max(others) == 31
    assert 30 < sum(fault.persistent for fault in schedule) < 70


def test_corruption_is_injected_into_audited_steps_with_one_microbatch_per_rank() -> None:
    config = load_config(None, ["train.global_batch_size=12", "train.micro_batch_size=2"])
    audited = prepare_for_corruption(config, 3)
    assert (audited.train.deterministic, audited.fault.audit_interval) == ("elastic", 1)
    assert (audited.train.micro_batch_size, config.train.micro_batch_size) == (4, 2)
    assert prepare_for_corruption(config, 5).train.micro_batch_size == 2
    config.fault.audit_interval = 3
    assert prepare_for_corruption(config, 3).fault.audit_interval == 3


def test_report_matches_faults_with_incidents(tmp_path: Path) -> None:
    faults = [
        InjectConfig("kill", 1, 3),
        InjectConfig("stop", 2, 5),
        InjectConfig("hang", 2, 7),
        InjectConfig("nan", 0, 9),
    ]
    (tmp_path / "injected").mkdir()
    for number, at in ((0, 100.0), (1, 200.0), (3, 300.0)):  # the third was never injected: the run ended before
        marker = tmp_path / "injected" / str(number)
        marker.write_text(json.dumps({"rank": faults[number].rank, "pid": 7}))
        os.utime(marker, (at, at))
    incidents = [
        {"kind": "died", "rank": 1, "time": 100.2, "recovered_s": 0.5, "steps_lost": 0},
        {"kind": "frozen", "rank": 0, "time": 200.8, "recovered_s": 0.25, "steps_lost": 2},
    ]
    metrics = [{"step": step, "time/unix": 90.0 + 10 * step, "time/step_s": 8.0} for step in (1, 2, 3, 3, 4)]
    for name, lines in (("incidents", incidents), ("metrics", metrics)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = build_report(faults, tmp_path)
    summary = report.to_json()
    assert (summary["planned"], summary["injected"], summary["attributed_correctly"], summary["steps_lost"]) == (
        4,
        3,
        1,
        2,
    )
    assert summary["kinds"]["kill"]["detected_s"] == [pytest.approx(0.2)]
    assert summary["kinds"]["stop"] == {
        "injected": 1,
        "attributed_correctly": 0,
        "detected_s": [pytest.approx(0.8)],
        "recovered_s": [0.25],
    }
    assert summary["kinds"]["nan"]["detected_s"] == []
    assert summary["goodput"] == pytest.approx(24.0 / 30.0), "a repeated step counts once"
    assert (
        "3 of 4 faults injected in 4 steps, 1 attributed correctly; 2 steps lost; goodput 80.0%" in report.format_text()
    )
