"""A user's dataset on Ray: exactly once through a kill, a shrink and a growth; classes of a script; readers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import ray

from raytrain_hpc import start, train
from tests.data.samples import image_task
from tests.data.samples.test_sample_training import VALIDATION, count_epochs
from tests.warm_pool import SMALL_OVERRIDES, make_small_config

STEPS = 41  # 12 epochs of 41 samples, in steps of 12
BASE = [f"train.steps={STEPS}", "train.micro_batch_size=2", "train.deterministic=elastic", "checkpoint.interval=0"]


class SlowLedger(image_task.Ledger):
    """A ledger that leaves time for workers to join, until the file `slow` is removed."""

    def post_step(self, metrics: dict[str, Any]) -> None:
        if (self.context.run_dir / "slow").exists():
            time.sleep(0.3)


def run_images(directory: Path, *words: str, resizes: tuple[int, ...] = ()) -> list[float]:
    """Train on a cluster, resize in turn, and return the losses of all steps."""
    config = make_small_config(directory, *BASE, *words)
    (directory / "slow").touch()
    parts: dict[str, Any] = {"loss": image_task.recording_loss, "dataset": image_task.Images()}
    run = start(config, model=image_task.build, val_dataset=VALIDATION, callbacks=[SlowLedger()], **parts)
    for size in resizes:
        run.resize(size)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not [m for m in run.metrics() if m["elastic/world_size"] == size]:
            time.sleep(0.05)
    (directory / "slow").unlink()
    assert run.result(90).outcome == "done"
    return [metrics["train/loss"] for metrics in run.metrics()]


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    directory = tmp_path_factory.mktemp("undisturbed")
    config = make_small_config(directory, *BASE, "cluster.workers=1")
    parts: dict[str, Any] = {"loss": image_task.recording_loss, "dataset": image_task.Images()}
    train(config, model=image_task.build, val_dataset=VALIDATION, quiet=True, **parts)
    return [json.loads(line)["train/loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [(["cluster.workers=3"], (2, 4)), (["cluster.workers=2", "parallel.zero=3", "data.num_readers=1"], (3,))],
)
def test_every_sample_is_used_once_per_epoch_through_faults(
    undisturbed: list[float], tmp_path: Path, words: list[str], sizes: tuple[int, ...]
) -> None:
    fault = "fault.inject=[{kind: kill, rank: 1, step: 4}]"
    losses = run_images(tmp_path, fault, *words, resizes=sizes)
    assert losses == undisturbed
    assert count_epochs(tmp_path) == [Counter(range(image_task.SIZE))] * 12
    incidents = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [incident["kind"] for incident in incidents] == ["died"]


SCRIPT = """
import sys
import torch
import raytrain_hpc as rt

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 30
    def __getitem__(self, index):
        return {"x": torch.full((3,), float(index)), "y": torch.tensor(float(index * index))}

def loss(model, batch):
    return ((model(batch["x"] / 30).squeeze(-1) - batch["y"] / 900) ** 2).sum()

if __name__ == "__main__":
    config = rt.load_config(None, sys.argv[1:])
    result = rt.train(config, model=lambda config: torch.nn.Linear(3, 1), loss=loss, dataset=Squares())
    print("loss", result.train_loss)
"""


def test_classes_of_a_script_reach_workers_and_readers(ray_cluster: None, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    outputs = []
    for number, words in enumerate((["cluster.workers=0"], ["cluster.workers=2", "data.num_readers=1"])):
        address = f"cluster.address={ray.get_runtime_context().gcs_address}"
        words = [*SMALL_OVERRIDES, *words, address, f"run.dir={tmp_path / str(number)}", "train.deterministic=elastic"]
        command = [sys.executable, str(tmp_path / "script.py"), *words, "train.micro_batch_size=2"]
        process = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
        assert process.returncode == 0, process.stdout + process.stderr
        outputs.append(process.stdout.splitlines()[-1])
        assert "data    Squares of the caller: 30 samples for training, none for validation" in process.stdout
    assert outputs[0] == outputs[1] and outputs[0].startswith("loss 0.")
