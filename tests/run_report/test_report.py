"""The HTML report: well-formed, complete and self-contained."""

from __future__ import annotations

import json
import re
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import raytrain_hpc as rt
from raytrain_hpc.cli.main import main
from raytrain_hpc.cli.status import format_status
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import ConfigError, RunDirectoryError
from raytrain_hpc.run_report.notebook import render_live_html
from raytrain_hpc.run_report.run_reader import read_run
from tests.run_report.run_directories import make_metrics, write_run_directory

_VOID = {"meta", "br", "link", "img", "input"}


class PageParser(HTMLParser):
    """Parser that records open elements, classes, text, the script's data and every URL that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.classes: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.data: dict[str, Any] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "action") or (value and "url(" in value):
                self.fetched.append(f"{name}={value}")
            if name == "class":
                self.classes += (value or "").split()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.classes += (dict(attrs).get("class") or "").split()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.data = json.loads(data) if data.startswith('{"runs"') else self.data
        elif self.open and self.open[-1] != "style":
            self.text.append(data)

    def get_chart(self, title: str) -> dict[str, Any]:
        """Return the data of the chart of that title."""
        return next(chart for chart in self.data["charts"] if chart["title"].startswith(title))


def parse_page(path: Path) -> tuple[PageParser, str]:
    parser, text = PageParser(), path.read_text()
    parser.feed(text)
    assert not parser.open
    return parser, " ".join(" ".join(parser.text).split())


def test_report_of_one_run(tmp_path: Path) -> None:
    parser, text = parse_page(rt.report([write_run_directory(tmp_path / "run")]))
    assert (tmp_path / "run" / "report.html").exists()
    for expected in ("died", "ALLREDUCE <3>", "killed by signal 9", "0.21", "host1", "93.0 %", "dp_replicate=2", "2.5"):
        assert expected in text, expected
    training, validation = parser.get_chart("Loss")["lines"]
    assert training["points"] == [[step, float(f"{8.0 / step:.6g}")] for step in range(1, 7)]  # the last record of 3
    assert validation["points"] == [[6, 2.5]] and validation["sparse"]
    assert "step 3" in text and "1100.00" in text  # the slowest rank in the statistics over ranks


def test_facts_and_sample_are_above_the_curves(tmp_path: Path) -> None:
    _, text = parse_page(rt.report([write_run_directory(tmp_path / "run")]))
    top = text.partition("Curves")[0]
    for expected in (
        "started 2023-11-14 22:12 UTC",  # of plan.json, half a minute before the first step
        "duration 1m35s",
        "hardware 2 × CPU worker (Z80) on host0, host1",
        "model 886k parameters: 4 layers, width 128, 4 heads; fp32",
        "4 microbatches of 8 × 128 tokens per step",
        "python 3.11.7, torch 2.13.0+cpu, ray 2.60.0",
        "Text sample, step 6 def <f>(x):",
        "tokens 6k",
        "incidents 1 steps lost 0",
    ):
        assert expected in top, expected


def test_incidents_are_marked_and_numbered(tmp_path: Path) -> None:
    parser, text = parse_page(rt.report([write_run_directory(tmp_path / "run")]))
    (mark,) = parser.get_chart("Loss")["marks"]
    assert (mark["step"], mark["label"]) == (3, "1")
    assert mark["text"] == "rank 1 died at step 4 on host1; recovered in 0.21 s; 2 → 1 ranks; 0 steps lost"
    assert mark["text"] in text  # also without the script
    assert "abort 0.12, fence 0.09" in text and "detect" not in text.replace("detected", "")
    assert {"mark", "marklabel", "alert"} <= set(parser.classes)


def test_other_x_axes_have_tokens_and_time_of_each_step(tmp_path: Path) -> None:
    parser, _ = parse_page(rt.report([write_run_directory(tmp_path / "run")]))
    assert parser.data["runs"][0]["axis"] == [[step, 1000 * step, step] for step in range(1, 7)]


def test_a_pause_between_two_starts_takes_no_time_on_the_axis(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for step, unix, generation in ((1, 0, 1), (2, 1, 1), (3, 9, 2), (4, 90_000, 3), (5, 90_001, 3)):
            file.write(json.dumps(make_metrics(step, **{"time/unix": unix, "elastic/generation": generation})) + "\n")
    parser, _ = parse_page(rt.report([run]))
    assert [seconds for _, _, seconds in parser.data["runs"][0]["axis"]] == [1, 2, 10, 11, 12]


def test_memory_is_split_by_kind_and_estimates_are_named(tmp_path: Path) -> None:
    _, text = parse_page(rt.report([write_run_directory(tmp_path / "run")]))
    assert "planned, 768 MiB" in text and "measured, 768 MiB" in text
    rows = {"weights": "128 102.4", "gradients": "128 102.4", "optimizer state": "128 204.8", "activations": "128"}
    for kind, sizes in rows.items():
        assert f"{kind} {sizes}" in text, kind
    assert "not counted by kind 358.4" in text  # up to the peak of 768 MiB
    assert "the planner's estimate before the run" in text and "resident memory of the whole process" in text


def test_offloaded_optimizer_state_is_no_memory_of_the_device(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("offload: none", "offload: cpu"))
    _, text = parse_page(rt.report([run]))
    assert "optimizer state 128 weight copies" in text and "not counted by kind 563.2" in text


def test_report_is_self_contained(tmp_path: Path) -> None:
    path = rt.report([write_run_directory(tmp_path / "run")])
    parser, _ = parse_page(path)
    assert parser.fetched == []
    source = path.read_text()
    assert "http" not in source and "@import" not in source and "//" not in re.sub(r"// .*", "", source)


def test_text_of_a_run_cannot_become_markup(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script>"
    run = write_run_directory(tmp_path / "run", name=hostile)
    (run / "incidents.jsonl").write_text(json.dumps({"kind": hostile, "step": 2, "reason": hostile}) + "\n")
    (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": hostile, "answer": hostile}) + "\n")
    page = rt.report([run])
    parser, text = parse_page(page)
    assert page.read_text().count("<script") == 2 and "alert(1)" in text
    assert parser.data["runs"][0]["name"] == hostile


def test_report_of_several_runs(tmp_path: Path) -> None:
    runs = [write_run_directory(tmp_path / "a", name="one"), write_run_directory(tmp_path / "b", name="<two>", steps=4)]
    with pytest.raises(ConfigError, match="is required for several runs"):
        rt.report(runs)
    config = runs[1] / "config.yaml"
    config.write_text(config.read_text().replace("num_layers: 4", "num_layers: 7"))
    parser, text = parse_page(rt.report(runs, tmp_path / "both.html"))
    assert "2 runs: one, <two>" in text
    names = [line["name"] for line in parser.get_chart("Loss")["lines"]]
    assert names == ["one", "one, validation", "<two>", "<two>, validation"]
    assert "Settings that differ model.num_layers 4 7" in text
    assert [mark["text"].partition(":")[0] for mark in parser.get_chart("Loss")["marks"]] == ["one", "<two>"]
    assert len([chart for chart in parser.data["charts"] if chart["stacked"]]) == 2


def test_many_runs_of_one_name_are_rows_named_by_their_directories(tmp_path: Path) -> None:
    runs = [write_run_directory(tmp_path / f"lr={number}", name="sweep") for number in range(6)]
    parser, text = parse_page(rt.report(runs, tmp_path / "sweep.html"))
    assert [run["name"] for run in parser.data["runs"]] == [f"lr={number}" for number in range(6)]
    assert "lr=5 done 6/6" in text
    assert "All settings but name and directory are the same." in text


def test_non_finite_values_are_omitted(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate((float("nan"), 3.0, float("inf"), 2.0), 1):
            file.write(json.dumps(make_metrics(step, **{"train/loss": loss, "train/grad_norm": loss})) + "\n")
    parser, _ = parse_page(rt.report([run]))
    assert parser.get_chart("Loss")["lines"][0]["points"] == [[2, 3.0], [4, 2.0]]


def test_report_of_a_run_with_missing_files(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run", done=False)
    for name in ("metrics.jsonl", "incidents.jsonl", "plan.json", "workers.json", "samples.jsonl"):
        (run / name).unlink()
    _, text = parse_page(rt.report([run]))
    assert "no result yet" in text and "0/6" in text
    with pytest.raises(RunDirectoryError, match="no such run directory"):
        rt.report([tmp_path / "nowhere"])
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        rt.report([run], tmp_path / "no such" / "page.html")


def test_steps_that_a_resumed_run_has_abandoned_are_not_its_progress(tmp_path: Path) -> None:
    """It was killed after step 6, resumed from a checkpoint of step 2, and had an evaluation of step 4 by itself."""
    run = write_run_directory(tmp_path / "one", done=False)
    resumed = [make_metrics(3, **{"train/loss": 5.0}), make_metrics(4), make_metrics(4, **{"val/loss": 3.5})]
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"\n{json.dumps(line)}" for line in (*resumed, 7))
    record = read_run(run)
    assert [line["step"] for line in record.metrics] == [1, 2, 3, 4]
    assert record.get_points("train/loss")[2] == (3, 5.0) and record.get_points("val/loss") == [(4, 3.5)]
    assert any(line.startswith("step 4/6") for line in format_status(run))
    handle = rt.Run(str(run), lambda: None, threading.Event(), lambda workers: None)
    assert [line["step"] for line in handle.metrics()] == [1, 2, 3, 4]


def test_damaged_incidents_and_samples_are_left_out(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    for name in ("incidents.jsonl", "samples.jsonl"):
        with (run / name).open("a") as file:
            file.write('\n7\n\n{"kind": "di')
    _, text = parse_page(rt.report([run]))
    assert "incidents 1 " in text
    assert any(line.startswith("incidents  1; last: rank 1 died") for line in format_status(run))
    assert "died" in render_live_html(RunDirectory(run), "running")


def test_step_phases_add_up(tmp_path: Path) -> None:
    parser, _ = parse_page(rt.report([write_run_directory(tmp_path / "run")]))
    chart = parser.get_chart("Step time by phase")
    first = {line["name"]: line["points"][0][1] for line in chart["lines"]}
    assert chart["unit"] == "s per step" and sum(first.values()) == pytest.approx(1.0)
    assert first == pytest.approx(
        {"forward": 0.2, "backward": 0.5, "communication": 0.1, "optimizer": 0.05, "data": 0.01, "rest": 0.14}
    )


def test_changes_of_the_number_of_ranks_are_stairs(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for step, ranks in enumerate((3, 3, 2, 2, 3), 1):
            file.write(json.dumps(make_metrics(step, **{"elastic/world_size": ranks})) + "\n")
    parser, text = parse_page(rt.report([run]))
    points = parser.get_chart("Ranks")["lines"][0]["points"]
    assert points == [[1, 3], [3, 3], [3, 2], [5, 2], [5, 3], [5, 3]]
    assert "ranks 3 → 2 → 3" in text


def test_newest_pipeline_timeline_is_shown(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    (run / "timeline").mkdir()
    for step, idle in ((4, 11), (6, 22)):
        picture = f'<svg xmlns="http://www.w3.org/2000/svg" width="1272" height="92"><text>idle {idle} %</text></svg>'
        (run / "timeline" / f"step-{step:08d}.svg").write_text(picture)
    _, text = parse_page(rt.report([run]))
    assert "idle 22 %" in text and "idle 11 %" not in text and "step-00000006" in text


def test_status_reads_the_run_directory(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run", done=False)
    lines = list(format_status(run))
    assert lines[0].endswith("not running; without a checkpoint, the same command starts again at the first step")
    (run / "checkpoints/step-00000006").mkdir(parents=True)
    (run / "checkpoints/step-00000006/manifest.json").touch()
    assert next(iter(format_status(run))).endswith("not running; repeat the same command to resume")
    assert lines[1] == "workers    2: 1 on host0, 1 on host1"
    assert lines[2].startswith("step 6/6  loss 1.333  lr 1.0e-3") and lines[2].endswith("ago)")
    assert lines[4] == "incidents  1; last: rank 1 died at step 4, recovered in 0.21 s"
    done = CliRunner().invoke(main, ["status", str(tmp_path / "nowhere")])
    assert done.exit_code == 2 and "no such run directory" in done.output


def test_notebook_view_is_well_formed_and_self_contained(tmp_path: Path) -> None:
    assert "getting ready" in render_live_html(RunDirectory(tmp_path / "run"), "getting ready")
    html = render_live_html(RunDirectory(write_run_directory(tmp_path / "run")), "running")
    parser = PageParser()
    parser.feed(html)
    assert not parser.open and not parser.fetched
    text = " ".join(parser.text)
    assert "6/6" in text and "running" in text and "1.333" in text and "nats per token" in text
