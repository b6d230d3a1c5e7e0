"""Every example runs, as a user would run it, with a few steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
import ray
from jupyter_client.blocking.client import BlockingKernelClient as KernelClient
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = ["model.hidden_size=32", "model.num_heads=2", "model.num_layers=1", "train.seq_len=16", "train.global_batch=8"]
FEW = [*TINY, "train.warmup=2", "train.eval_samples=4", "observe.sample_tokens=0", "observe.tensorboard=false"]


def run(directory: Path, *command: str) -> str:
    """Output of a command in an empty directory; it has two minutes and must succeed."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_quickstart_follows_its_run(tmp_path: Path) -> None:
    words = [*FEW, "train.steps=40", "data.path=synthetic", "cluster.workers=0"]  # the notebook has its run on Ray
    output = run(tmp_path, sys.executable, str(EXAMPLES / "quickstart.py"), *words)
    assert "step   40  loss " in output
    assert "done after 40 steps" in output
    result = json.loads((tmp_path / "runs/quickstart_api/result.json").read_text())
    assert f"validation loss {result['val/loss']:.3f}" in output


def test_custom_module_trains(ray_cluster: None, tmp_path: Path) -> None:
    words = [*FEW, "model.num_heads=1", "train.steps=10", "data.path=synthetic", "train.micro_batch=2"]
    words.append(f"cluster.address={ray.get_runtime_context().gcs_address}")
    output = run(tmp_path, sys.executable, str(EXAMPLES / "custom_module.py"), *words)
    assert "model   given by the caller" in output
    assert "done: 10 steps" in output


def test_custom_module_says_in_one_line_what_is_wrong(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "custom_module.py"), "train.lrr=1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith("error: train.lrr=1 (command line): no such key")
    assert "Traceback" not in done.stderr


@pytest.mark.timeout(200)
def test_notebook_runs_from_top_to_bottom(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    # Steps long enough that `stop` comes before the last one.
    words = [*FEW, "model.hidden_size=128", "train.seq_len=64", "train.global_batch=16", "cluster.workers=2"]
    parameters.source = f"steps = 120\nextra = {words!r}"
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES.parent}:{path}" if path else str(EXAMPLES.parent))
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = [" ".join(output.data["text/plain"].split()) for output in outputs if "data" in output]
    assert any(text.startswith("('stopped', ") for text in shown)
    assert any(text.startswith("('done', 120, ") for text in shown)
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/notebook/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 121))
    live = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("120/120" in text and "<polyline" in text for text in live)  # what `watch` showed last
    assert (tmp_path / "runs/notebook/report.html").exists()


def test_interrupting_the_kernel_ends_the_showing_and_not_the_run(ray_cluster: None, tmp_path: Path) -> None:
    """With the signal that Jupyter sends, to the kernel and all its children."""
    words = [*FEW, "data.path=synthetic", "train.steps=100000", "cluster.workers=2"]
    words += [f"cluster.address={ray.get_runtime_context().gcs_address}", f"run.dir={tmp_path / 'run'}"]
    manager, client = start_new_kernel(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)})
    try:
        ask = partial(said, client)
        ask(f"import raytrain_hpc as rt; run = rt.start(rt.load_config(None, {words!r}))")
        ask("import time\nwhile len(run.metrics()) < 3: time.sleep(0.1)")
        waiting = client.execute("run.watch()")
        while not any("<polyline" in text for text in shown_by(client, waiting)):
            pass
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=30)
        assert reply["content"]["status"] == "ok", "`watch` returns"
        before = int(ask("print(len(run.metrics()))"))
        ask(f"while len(run.metrics()) < {before + 20}: time.sleep(0.1)")
        assert ask("print(run.running)") == "True"
        assert ask("run.stop(); print(run.result(60).outcome)").splitlines()[-1] == "stopped"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def said(client: KernelClient, code: str) -> str:
    """What code prints in the kernel, which has a minute for it and must not fail."""
    lines: list[str] = []
    reply = client.execute_interactive(
        code, timeout=60, output_hook=lambda message: lines.append(message["content"].get("text", ""))
    )
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(lines).strip()


def shown_by(client: KernelClient, request: str) -> list[str]:
    """The HTML of the next message of a cell that still runs."""
    message = client.get_iopub_msg(timeout=30)
    mine = message["parent_header"].get("msg_id") == request
    html = message["content"].get("data", {}).get("text/html") if mine else None
    return [html] if html else []


def test_submit_script_hands_its_words_on(tmp_path: Path) -> None:
    """What the script asks `ray` to do; the job itself is tested in tests/jobs."""
    (tmp_path / "ray").write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(EXAMPLES / "submit_job.sh"), "conf/llama3_8b.yaml", "run.dir=/shared/a b"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    directory, *words = done.stdout.splitlines()
    assert Path(directory) == EXAMPLES.parent
    entry = ["raytrain-hpc", "train", "conf/llama3_8b.yaml", "run.dir=/shared/a b"]
    assert words == ["job", "submit", "--working-dir", ".", "--", *entry]
