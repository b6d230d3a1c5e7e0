"""Loss curves of compute types: the runs of the script on a CPU, its table, and runs that fail."""

from __future__ import annotations

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

STEPS, WINDOW, WARMUP = 20, 5, 1  # the script derives the last two from the steps


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("gpu_loss_curves")


def test_dry_run_without_ray_compares_float8_with_fp32(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('this process must not use Ray')\n")
    words = random.Random(0).choices(["gradient", "loss", "step", "weight"], k=2000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    out = tmp_path / "out"
    command = [sys.executable, "benchmarks/gpu_loss_curves.py", "--dry-run", "--text", str(tmp_path / "text.txt")]
    command += ["--out", str(out), "--runs", "fp32,float8-head", "--steps", str(STEPS)]
    path = os.pathsep.join([str(tmp_path), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = {name: _read_jsonl(out / f"{name}.jsonl") for name in ("fp32", "float8-head")}
    for curve in lines.values():
        assert [line["step"] for line in curve] == list(range(1, STEPS + 1))
        assert [line["step"] for line in curve if "val_loss" in line] == [STEPS // 2, STEPS]
        assert curve[-1]["loss"] < curve[0]["loss"] - 1 and curve[-1]["val_loss"] < curve[0]["loss"] - 1
    fp32, float8 = (np.array([line["loss"] for line in curve]) for curve in lines.values())
    assert fp32[0] == pytest.approx(np.log(256), rel=0.05)
    assert float8[0] == pytest.approx(fp32[0], rel=1e-2) and not np.any(float8 == fp32)
    means = [np.convolve(losses, np.full(WINDOW, 1 / WINDOW), "valid") for losses in (fp32, float8)]
    differences = 100 * (means[1] / means[0] - 1)
    start = WARMUP + int(np.argmax(np.abs(differences[WARMUP:])))
    val_fp32, val_float8 = (curve[-1]["val_loss"] for curve in lines.values())
    assert done.stdout.splitlines()[2:] == [
        f"| fp32 | {STEPS} | {means[0][-1]:.4f} | - | - | {val_fp32:.4f} | - |",
        f"| float8-head | {STEPS} | {means[1][-1]:.4f} | {differences[-1]:+.3f} "
        f"| {differences[start]:+.3f} ({start + 1} to {start + WINDOW}) "
        f"| {val_float8:.4f} | {100 * (val_float8 / val_fp32 - 1):+.3f} |",
    ]


def test_runs_of_different_lengths_are_compared_over_their_common_steps(script: ModuleType) -> None:
    """A run 1 % above fp32 that ended after 12 of 20 steps; its last window is compared with the same steps."""
    base = script.Curve([float(step) for step in range(20, 0, -1)], 1.0)
    curve = script.Curve([1.01 * loss for loss in base.losses[:12]], None)
    table = script.format_table({"fp32": base, "bf16": curve}, script.Schedule(20))
    cells = table.splitlines()[-1].strip("| ").split(" | ")
    assert cells[:4] == ["bf16", "12", f"{1.01 * 11:.4f}", "+1.000"] and cells[4].startswith("+1.000 (")
    assert cells[5:] == ["-", "-"]
    assert script.format_table({"bf16": curve}, script.Schedule(20)).splitlines()[-1].count("| - ") == 4


def test_a_failed_run_is_reported_with_its_last_lines_and_the_others_finish(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "bf16.jsonl").write_text('{"step": 1, "loss": 1.0}\n')  # of an earlier call
    programs = {
        "bf16": "import sys; print('\\n'.join(map(str, range(9)))); sys.exit('no memory')",
        "float8": "import time; time.sleep(100)",
        "fp32": f"open({str(tmp_path / 'fp32.jsonl')!r}, 'w').write('{{\"step\": 1, \"loss\": 2.0}}\\n')",
    }
    commands = {name: [sys.executable, "-c", program] for name, program in programs.items()}
    errors = script.run_all(commands, tmp_path, timeout_s=3.0)
    assert errors.keys() == {"bf16", "float8"} and errors["float8"] == "ended after 3 s"
    assert errors["bf16"].splitlines()[0] == "exit code 1" and "no memory" in errors["bf16"]
    assert len(errors["bf16"].splitlines()) == 1 + script.ERROR_LINES
    assert script.read_curve(tmp_path / "bf16.jsonl") == script.Curve([], None)
    assert script.read_curve(tmp_path / "fp32.jsonl") == script.Curve([2.0], None)


def _read_jsonl(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
