"""The report names the longest operations of profiled steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raytrain_hpc as rt
from raytrain_hpc.driver.run_directory import read_run_directory
from raytrain_hpc.run_report.run_reader import read_run
from raytrain_hpc.storage.object_path import ObjectPath
from tests.run_report.run_directories import write_run_directory
from tests.run_report.test_report import parse_page
from tests.warm_pool import WarmPool, make_small_config


def read_operator(trace: Path, name: str) -> tuple[int, float]:
    """Return the calls of an operator in a trace, and their microseconds without the operators nested in them."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]
    calls, self_us = 0, 0.0
    for event in (event for event in events if event["name"] == name):
        end, covered_until = event["ts"] + event["dur"], event["ts"]
        calls, self_us = calls + 1, self_us + event["dur"]
        for nested in sorted(events, key=lambda other: other["ts"]):
            if nested is event or nested["tid"] != event["tid"] or not event["ts"] <= nested["ts"] < end:
                continue
            if nested["ts"] >= covered_until:
                self_us, covered_until = self_us - nested["dur"], nested["ts"] + nested["dur"]
    return calls, self_us


def test_report_of_a_profiled_run_has_its_operations(pool: WarmPool, tmp_path: Path) -> None:
    """Calls and times are compared with the trace: durations of operators without those nested in them."""
    words = ["cluster.workers=2", "profiler.name=torch", "profiler.ranks=[0,1]", "profiler.steps=[1,3]"]
    pool.train(make_small_config(tmp_path / "trained", *words))
    run = write_run_directory(tmp_path / "run")
    (tmp_path / "trained" / "profile").rename(run / "profile")
    first, second = read_run(run).profiles
    assert (first.rank, second.rank) == (0, 1) and (first.first_step, first.last_step) == (2, 3)
    calls, self_us = read_operator(run / "profile" / "rank-00000.trace.json", "aten::mm")
    (row,) = (row for row in first.kernels.operations if row.name == "aten::mm")
    assert row.calls == calls > 0 and row.seconds * 1e6 == pytest.approx(self_us, rel=1e-3)
    assert first.kernels.compute_share("communication") > 0 and first.kernels.compute_share("attention") > 0
    _, text = parse_page(rt.report([run]))
    _, _, section = text.partition(" Profile ")
    assert "rank steps GEMM (%) attention (%) communication (%) other (%) idle (%)" in section
    assert (
        f"aten::mm GEMM {row.calls} {1000 * row.seconds:.2f} {100 * row.seconds / first.kernels.busy_s:.1f}" in section
    )
    assert f"0 2 to 3 {100 * first.kernels.compute_share('GEMM'):.1f}" in section and "1 2 to 3" in section


def test_an_incomplete_summary_is_left_out(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    (run / "profile").mkdir()
    for number, text in enumerate(('{"rank": 0, "first_st', '{"rank": 0}', "[]")):
        (run / "profile" / f"rank-{number:05d}.kernels.json").write_text(text)
    assert read_run(run).profiles == []
    _, text = parse_page(rt.report([run]))
    assert " Profile " not in text


def test_summaries_are_read_from_an_object_store_without_the_traces(folder: ObjectPath, tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    kernels = {"device": "cuda", "window_s": 2.0, "idle_s": 0.5, "operations": []}
    summary = json.dumps({"rank": 3, "first_step": 11, "last_step": 15, **kernels}).encode()
    (folder / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    (folder / "profile/rank-00003.kernels.json").write_bytes(summary)
    (folder / "profile/rank-00003.trace.json").write_bytes(b"large")
    directory = read_run_directory(str(folder))
    (profile,) = read_run(directory).profiles
    assert (profile.rank, profile.first_step, profile.last_step) == (3, 11, 15)
    assert profile.kernels.idle_share == 0.25
    assert [path.name for path in directory.profile.iterdir()] == ["rank-00003.kernels.json"]
