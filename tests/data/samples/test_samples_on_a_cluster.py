"""A user's dataset on Ray: exactly once through a kill, a shrink and a growth; classes of a script; readers."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import ray.data
from ray import cloudpickle
from torchdata.stateful_dataloader import StatefulDataLoader

from raytrain_hpc import ConfigError, start, train
from raytrain_hpc.driver.worker_group import ActorPool
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from tests.data.samples import image_task, stream_task
from tests.data.samples.test_sample_training import VALIDATION, count_epochs
from tests.warm_pool import SMALL_OVERRIDES, make_small_config

STEPS = 41  # 12 epochs of 41 samples, in steps of 12
BASE = [f"train.steps={STEPS}", "train.micro_batch_size=2", "train.deterministic=elastic", "checkpoint.interval=0"]


class SlowLedger(image_task.Ledger):
    """A ledger that leaves time for workers to join, until the file `slow` is removed."""

    def post_step(self, metrics: dict[str, Any]) -> None:
        if (self.context.run_dir / "slow").exists():
            time.sleep(0.3)


def run_images(
    directory: Path, *words: str, resizes: tuple[int, ...] = (), dataset: Any = None, **options: Any
) -> list[float]:
    """Train on a cluster, resize in turn, and return the losses of all steps."""
    config = make_small_config(directory, *BASE, *words)
    directory.mkdir(exist_ok=True)
    (directory / "slow").touch()
    parts: dict[str, Any] = {"loss": image_task.recording_loss, "val_dataset": VALIDATION, **options}
    parts["dataset"] = image_task.Images() if dataset is None else dataset
    run = start(config, model=image_task.build, callbacks=[SlowLedger()], **parts)
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


class Counted(image_task.Images):
    """Images beside an array of `nbytes`; every serialization adds a byte to a file."""

    def __init__(self, log: Path, nbytes: int):
        super().__init__()
        self._log, self._array = log, np.ones(nbytes, dtype=np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        with self._log.open("ab") as file:
            file.write(b".")
        return self.__dict__

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert not self._array.flags.writeable, "the array is not that of the object store"
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("words", "sizes"),
    [(["cluster.workers=3"], (2, 4)), (["cluster.workers=2", "parallel.zero=3", "data.num_readers=1"], (3,))],
)
def test_every_sample_is_used_once_per_epoch_through_faults(
    undisturbed: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    sizes: tuple[int, ...],
) -> None:
    """The dataset is serialized once, also for workers that start later, and what is sent instead does not grow."""
    sent: list[int] = []

    def put_spec(self: ActorPool, spec: WorkerSpec) -> Any:
        reference = original(self, spec)
        sent.append(len(cloudpickle.dumps(ray.get(reference))))
        return reference

    original = ActorPool.put_spec
    monkeypatch.setattr(ActorPool, "put_spec", put_spec)
    has_readers = "data.num_readers=1" in words  # which receive a copy in every generation
    dataset = image_task.Images() if has_readers else Counted(tmp_path / "pickles", 32 << 20)
    fault = "fault.inject=[{kind: kill, rank: 1, step: 4}]"
    losses = run_images(tmp_path, fault, *words, resizes=sizes, dataset=dataset)
    assert losses == undisturbed
    assert count_epochs(tmp_path) == [Counter(range(image_task.SIZE))] * 12
    incidents = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [incident["kind"] for incident in incidents] == ["died"]
    assert len(sent) >= 3 and max(sent) < 32 << 10  # several generations, of which a kill and a resize can share one
    if isinstance(dataset, Counted):
        assert len((tmp_path / "pickles").read_bytes()) == 1


def make_stateful_loader() -> StatefulDataLoader:
    images = image_task.Images(augment=False)  # a worker of the loader draws other bits after a resume
    return StatefulDataLoader(images, batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize(
    ("make_stream", "words"),
    [(stream_task.PlainStream, ["data.num_readers=1"]), (make_stateful_loader, ["parallel.zero=3"])],
)
def test_streams_are_used_once_per_epoch_through_faults(
    ray_cluster: None, tmp_path: Path, make_stream: Any, words: list[str]
) -> None:
    """The bits are those of a run in this process."""
    fault = "fault.inject=[{kind: kill, rank: 1, step: 4}]"
    losses = run_images(tmp_path / "faults", "cluster.workers=3", fault, *words, resizes=(2, 4), dataset=make_stream())
    epochs = count_epochs(tmp_path / "faults")
    assert len(epochs) >= 11 and epochs == [Counter(range(image_task.SIZE))] * len(epochs)
    config = make_small_config(tmp_path / "local", *BASE, "cluster.workers=0")
    options: dict[str, Any] = {"loss": image_task.recording_loss, "val_dataset": VALIDATION, "quiet": True}
    train(config, model=image_task.build, dataset=make_stream(), **options)
    lines = (tmp_path / "local" / "metrics.jsonl").read_text().splitlines()
    assert losses == [json.loads(line)["train/loss"] for line in lines]


def delay_first_block(batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(1.0 if 0 in batch["index"] else 0.0)
    return batch


def test_rows_of_ray_data_have_the_bits_of_a_list(ray_cluster: None, tmp_path: Path) -> None:
    """Through a kill and a shrink, in order although the first block is ready last. The dataset keeps its settings."""
    images = [image_task.Images(augment=False)[index] for index in range(image_task.SIZE)]
    rows = [{**row, "image": row["image"].numpy()} for row in images]
    blocks = ray.data.from_items(rows, override_num_blocks=3).map_batches(delay_first_block)
    expected = run_images(tmp_path / "rows", "cluster.workers=0", "train.steps=20", dataset=rows, val_dataset=rows)
    words = ["cluster.workers=3", "train.steps=20", "fault.inject=[{kind: kill, rank: 1, step: 4}]"]
    losses = run_images(tmp_path / "blocks", *words, dataset=blocks, val_dataset=blocks, resizes=(2,))
    assert losses == expected
    files = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("rows", "blocks")]
    validation_losses = [json.loads(lines[-1])["val/loss"] for lines in files]
    assert validation_losses[0] == validation_losses[1]
    assert not blocks.context.execution_options.preserve_order
    config = make_small_config(tmp_path / "readers", "data.num_readers=1")
    with pytest.raises(ConfigError, match="data.num_readers=1.*a reader process cannot read Ray's object store"):
        train(config, model=image_task.build, loss=image_task.loss, dataset=blocks, quiet=True)


SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader
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
    config = rt.load_config(None, [*sys.argv[1:], "data.num_readers=auto", f"run.dir={config.run.dir}-loader"])
    collate = lambda rows: torch.utils.data.default_collate(rows)
    loader = DataLoader(Squares(), batch_size=2, num_workers=1, collate_fn=collate)
    streamed = rt.train(config, model=lambda config: torch.nn.Linear(3, 1), loss=loss, dataset=loader)
    print("loss", result.train_loss, streamed.train_loss)
"""


def test_classes_of_a_script_reach_workers_readers_and_workers_of_loaders(ray_cluster: None, tmp_path: Path) -> None:
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
