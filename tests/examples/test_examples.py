"""Every example runs as a user would run it, with few steps."""

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

from tests.driver.cli_process import CliRunner
from tests.driver.throttle import throttle

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_layers=1",
    "train.seq_len=16",
    "train.global_batch_size=8",
]
FEW_STEPS = [
    *TINY,
    "lr_scheduler.warmup_steps=2",
    "eval.samples=4",
    "logging.sample_tokens=0",
    "logging.tensorboard=false",
]


def run(directory: Path, *command: str) -> str:
    """Run a command in an empty directory and return its output. It must succeed within two minutes."""
    process = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_quickstart_prints_the_progress_of_its_run(cli: CliRunner, tmp_path: Path) -> None:
    overrides = [*FEW_STEPS, "train.steps=40", "data.path=synthetic", "cluster.workers=0"]  # the notebook trains on Ray
    code, output = cli.run_script(tmp_path / "output", EXAMPLES / "quickstart.py", *overrides)
    assert code == 0, output
    assert "step   40  loss " in output
    assert "done after 40 steps" in output
    result = json.loads((tmp_path / "runs/quickstart_api/result.json").read_text())
    assert f"validation loss {result['val/loss']:.3f}" in output


def test_custom_module_trains(ray_cluster: None, tmp_path: Path) -> None:
    overrides = [*FEW_STEPS, "model.num_heads=1", "train.steps=10", "data.path=synthetic", "train.micro_batch_size=2"]
    overrides.append(f"cluster.address={ray.get_runtime_context().gcs_address}")
    output = run(tmp_path, sys.executable, str(EXAMPLES / "custom_module.py"), *overrides)
    assert "model   given by the caller" in output
    assert "done: 10 steps" in output


def test_custom_module_reports_a_wrong_key_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "custom_module.py"), "train.lrr=1"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode != 0
    assert process.stderr.splitlines()[-1].startswith("error: train.lrr=1 (load_config): no such key")
    assert "Traceback" not in process.stderr


@pytest.mark.timeout(200)
def test_notebook_runs_completely(ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    # Steps that are long enough for `stop` to come before the last one.
    overrides = [
        *FEW_STEPS,
        "model.hidden_size=128",
        "train.seq_len=64",
        "train.global_batch_size=16",
        "cluster.workers=2",
        *throttle(2),
    ]
    parameters.source = f"steps = 80\nextra = {overrides!r}"
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{EXAMPLES.parent}:{path}" if path else str(EXAMPLES.parent))
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = [" ".join(output.data["text/plain"].split()) for output in outputs if "data" in output]
    assert any(text.startswith("('stopped', ") for text in texts)
    assert any(text.startswith("('done', 80, ") for text in texts)
    steps = [json.loads(line)["step"] for line in (tmp_path / "runs/notebook/metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 81))
    html = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("80/80" in text and "<polyline" in text for text in html)  # the last output of `watch`
    assert (tmp_path / "runs/notebook/report.html").exists()


def test_interrupting_the_kernel_stops_the_display_but_not_the_run(ray_cluster: None, tmp_path: Path) -> None:
    """Jupyter signals the kernel and all its child processes."""
    overrides = [*FEW_STEPS, "data.path=synthetic", "train.steps=100000", "cluster.workers=2"]
    overrides += [f"cluster.address={ray.get_runtime_context().gcs_address}", f"run.dir={tmp_path / 'run'}"]
    manager, client = start_new_kernel(cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(EXAMPLES.parent)})
    try:
        run_code = partial(run_in_kernel, client)
        run_code(f"import raytrain_hpc as rt; run = rt.start(rt.load_config(None, {overrides!r}))")
        run_code("import time\nwhile len(run.metrics()) < 3: time.sleep(0.1)")
        waiting = client.execute("run.watch()")
        while not any("<polyline" in text for text in receive_html(client, waiting)):
            pass
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=30)
        assert reply["content"]["status"] == "ok", "`watch` returns"
        num_metrics = int(run_code("print(len(run.metrics()))"))
        run_code(f"while len(run.metrics()) < {num_metrics + 20}: time.sleep(0.1)")
        assert run_code("print(run.running)") == "True"
        lines = run_code("run.stop(); print(run.result(60).outcome)").splitlines()  # Ray may print more
        assert "stopped" in lines, lines
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_in_kernel(client: KernelClient, code: str) -> str:
    """Run code in the kernel and return its output. It must succeed within a minute."""
    lines: list[str] = []
    reply = client.execute_interactive(
        code, timeout=60, output_hook=lambda message: lines.append(message["content"].get("text", ""))
    )
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(lines).strip()


def receive_html(client: KernelClient, request: str) -> list[str]:
    """Return the HTML of the next message of a running cell."""
    message = client.get_iopub_msg(timeout=30)
    is_reply = message["parent_header"].get("msg_id") == request
    html = message["content"].get("data", {}).get("text/html") if is_reply else None
    return [html] if html else []


def test_submit_script_passes_its_arguments_on(tmp_path: Path) -> None:
    """Only the arguments of `ray` are checked; tests/jobs runs the job."""
    (tmp_path / "ray").write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(EXAMPLES / "submit_job.sh"), "conf/llama3_8b.yaml", "run.dir=/shared/a b"]
    process = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True)
    directory, *arguments = process.stdout.splitlines()
    assert Path(directory) == EXAMPLES.parent
    entry = ["raytrain-hpc", "train", "conf/llama3_8b.yaml", "run.dir=/shared/a b"]
    assert arguments == ["job", "submit", "--working-dir", ".", "--", *entry]
