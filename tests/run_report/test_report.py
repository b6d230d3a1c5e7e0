"""The HTML report: well-formed, complete and self-contained."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

import raytrain_hpc as rt
from raytrain_hpc.cli.main import main
from raytrain_hpc.cli.status import format_status
from raytrain_hpc.errors import ConfigError, RunDirectoryError
from raytrain_hpc.run_report.figures import compute_mean_phases
from raytrain_hpc.run_report.notebook import render_live_html
from tests.run_report.run_directories import make_metrics, write_run_directory

_VOID = {"meta", "br", "link", "img", "input"}


class PageParser(HTMLParser):
    """Parser that records open elements, text, chart data and every URL that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.charts: list[list[dict]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in _VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "data", "action") or (value and "url(" in value):
                self.fetched.append(f"{name}={value}")
            if name == "data-lines":
                self.charts.append(json.loads(value or ""))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


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
    loss = next(chart for chart in parser.charts if chart[0]["points"][0] == [1, 8.0])
    assert loss[0]["points"] == [[step, 8.0 / step] for step in range(1, 7)]  # the last record of step 3
    assert loss[1]["points"] == [[6, 2.5]]
    assert "step 3" in text and "1100.000 ms" in text  # the slowest rank in the statistics over ranks


def test_report_is_self_contained(tmp_path: Path) -> None:
    path = rt.report([write_run_directory(tmp_path / "run")])
    parser, _ = parse_page(path)
    assert parser.fetched == []
    source = re.sub(r"http://www\.w3\.org/\S+", "", path.read_text())  # XML namespaces
    assert "http" not in source and "//" not in re.sub(r"// .*", "", source).replace("file://", "")


def test_report_of_several_runs(tmp_path: Path) -> None:
    runs = [write_run_directory(tmp_path / "a", name="one"), write_run_directory(tmp_path / "b", name="<two>", steps=4)]
    with pytest.raises(ConfigError, match="is required for several runs"):
        rt.report(runs)
    parser, text = parse_page(rt.report(runs, tmp_path / "both.html"))
    assert "one, <two>" in text
    names = [line["name"] for line in parser.charts[0]]
    assert names == ["one", "one, validation", "<two>", "<two>, validation"]


def test_non_finite_values_are_omitted(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run")
    with (run / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate((float("nan"), 3.0, float("inf"), 2.0), 1):
            file.write(json.dumps(make_metrics(step, **{"train/loss": loss, "train/grad_norm": loss})) + "\n")
    parser, _ = parse_page(rt.report([run]))
    assert parser.charts[0][0]["points"] == [[2, 3.0], [4, 2.0]]


def test_report_of_a_run_with_missing_files(tmp_path: Path) -> None:
    run = write_run_directory(tmp_path / "run", done=False)
    for name in ("metrics.jsonl", "incidents.jsonl", "plan.json", "workers.json"):
        (run / name).unlink()
    _, text = parse_page(rt.report([run]))
    assert "running" in text and "0 of 6" in text
    with pytest.raises(RunDirectoryError, match="no run directory"):
        rt.report([tmp_path / "nowhere"])
    with pytest.raises(RunDirectoryError, match="cannot be written"):
        rt.report([run], tmp_path / "no such" / "page.html")


def test_step_phases_add_up() -> None:
    phases = compute_mean_phases([make_metrics(1), make_metrics(2, **{"time/step_s": 3.0, "time/forward_s": 1.2})])
    assert phases["forward"] == pytest.approx(0.7) and phases["rest"] == pytest.approx(2.0 - 0.01 - 0.7 - 0.65)


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
    assert lines[0].endswith("not running; repeat the same command to resume")
    assert lines[1] == "workers    2: 1 on host0, 1 on host1"
    assert lines[2].startswith("step 6/6  loss 1.333  lr 1.0e-3") and lines[2].endswith("ago)")
    assert lines[4] == "incidents  1, last: died: rank 1 at step 3, next step after 0.21 s"
    done = CliRunner().invoke(main, ["status", str(tmp_path / "nowhere")])
    assert done.exit_code == 2 and "no run directory" in done.output


def test_notebook_view_is_well_formed_and_self_contained(tmp_path: Path) -> None:
    assert "getting ready" in render_live_html(tmp_path / "run", "getting ready")
    html = render_live_html(write_run_directory(tmp_path / "run"), "running")
    parser = PageParser()
    parser.feed(html)
    assert not parser.open and not parser.fetched
    text = " ".join(parser.text)
    assert "6/6" in text and "running" in text and "1.333" in text
