"""Scripts with their own loop under ZeRO and HSDP: the losses of the plain script, with a kill, by a few lines."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from raytrain_hpc.api import run_script
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ModelError
from tests.examples import sharded_scripts as scripts

BASE = ["data.path=synthetic", "data.engine=local", "model.vocab_size=2", "logging.tensorboard=false"]
SCRIPTS = {
    "language model": (scripts.LANGUAGE_MODEL, scripts.PLAIN_PARTS, scripts.ATTACHED_PARTS, 12),
    "prefetching": (scripts.LANGUAGE_MODEL, scripts.PLAIN_PREFETCHING_PARTS, scripts.PREFETCHING_PARTS, 12),
    "fine-tuning": (scripts.FINE_TUNING, scripts.PLAIN_TUNING, scripts.ATTACHED_TUNING, 18),
}
LAYOUTS = {
    "ddp-3": ["cluster.workers=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero2-3": ["cluster.workers=3", "parallel.zero=2"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
    "hsdp-2x2": ["cluster.workers=4", "parallel.zero=3", "parallel.dp_replicate=2", "parallel.dp_shard=2"],
}
KILL = "fault.inject=[{kind: kill, rank: 1, step: 6}]"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Return the losses that the plain scripts print."""
    directory = tmp_path_factory.mktemp("plain")
    paths = [directory / f"script{number}.py" for number in range(len(SCRIPTS))]
    for path, (template, parts, _, _) in zip(paths, SCRIPTS.values(), strict=True):
        path.write_text(template.format(**parts))
    # One after another in one process, which imports torch and transformers once.
    code = "import runpy, sys\nfor path in sys.argv[1:]: print('script'); runpy.run_path(path)"
    process = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True, timeout=100)
    assert process.returncode == 0, process.stderr
    outputs = process.stdout.split("script\n")[1:]
    losses = {
        name: [float(line.split()[-1]) for line in output.splitlines() if "loss" in line]
        for name, output in zip(SCRIPTS, outputs, strict=True)
    }
    assert [len(values) for values in losses.values()] == [steps for *_, steps in SCRIPTS.values()]
    return losses


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    last = {}
    for line in (run_dir / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        last[record["step"]] = record
    return [last[step] for step in sorted(last)]


def run_attached(directory: Path, source: str, steps: int, *words: str) -> list[dict[str, Any]]:
    directory.mkdir(exist_ok=True)
    (directory / "script.py").write_text(source)
    config = load_config(None, [f"run.dir={directory / 'run'}", *BASE, f"train.steps={steps}", *words])
    result = run_script(config, directory / "script.py", quiet=True)
    assert (result.outcome, result.steps) == ("done", steps)
    return read_metrics(directory / "run")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_attached_by_at_most_eight_lines(name: str) -> None:
    template, plain_parts, attached_parts, _ = SCRIPTS[name]
    sources = [template.format(**parts).splitlines() for parts in (plain_parts, attached_parts)]
    added = [line for line in difflib.ndiff(*sources) if line.startswith("+ ") and line[2:].strip()]
    assert len(added) <= 8


CASES = [*(("language model", layout) for layout in LAYOUTS), ("fine-tuning", "ddp-3"), ("fine-tuning", "zero3-3")]
CASES += [("prefetching", "zero3-3")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_a_killed_rank_keeps_the_losses_of_the_plain_script(
    ray_cluster: None, plain: Any, tmp_path: Path, name: str, layout: str
) -> None:
    template, _, parts, steps = SCRIPTS[name]
    metrics = run_attached(tmp_path, template.format(**parts), steps, *LAYOUTS[layout], KILL)
    assert [step["train/loss"] for step in metrics] == pytest.approx(plain[name], rel=1e-6)
    incidents = [json.loads(line) for line in (tmp_path / "run/incidents.jsonl").read_text().splitlines()]
    assert [(incident["kind"], incident["steps_lost"]) for incident in incidents] == [("died", 0)]


def test_several_models_and_optimizers_and_backward_passes(ray_cluster: None, tmp_path: Path) -> None:
    runs = {}
    for layout, words in {"one": ["cluster.workers=0"], "zero3": [*LAYOUTS["zero3-3"], KILL]}.items():
        metrics = run_attached(tmp_path / layout, scripts.ADVERSARIAL, 10, "checkpoint.interval=0", *words)
        keys = ("gan/generator", "gan/critic", "train/loss")
        runs[layout] = [step[key] for step in metrics for key in keys]
        steps = [path.name for path in (tmp_path / layout / "run/checkpoints").glob("step-*")]
        assert sorted(steps) == ["step-00000005", "step-00000010"], "the requested one and the last one"
    assert runs["one"] == pytest.approx(runs["zero3"], rel=1e-5)


def test_a_sharded_run_resumes_on_another_layout(ray_cluster: None, plain: Any, tmp_path: Path) -> None:
    """Stopped by the end of its steps; continued with more steps on replicas: generators and scaler go on too."""
    template, _, parts, _ = SCRIPTS["language model"]
    source = template.format(**parts).replace("run.steps(max_iters)", "run.steps()")
    run_attached(tmp_path, source, 7, *LAYOUTS["zero3-3"])
    metrics = run_attached(tmp_path, source, 12, "cluster.workers=2")
    assert [step["train/loss"] for step in metrics] == pytest.approx(plain["language model"], rel=1e-6)


def test_an_optimizer_that_has_taken_steps_is_refused(tmp_path: Path) -> None:
    source = (
        "import torch, raytrain_hpc as rt\nmodel, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(other.parameters(), 0.1)\nrt.attach(model, optimizer)\n"
    )
    with pytest.raises(ModelError, match="a parameter that the model does not have"):
        run_attached(tmp_path, source, 3, "cluster.workers=0")
