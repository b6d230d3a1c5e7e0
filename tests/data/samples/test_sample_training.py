"""Training on a user's dataset: the same bits on any number of workers, with readers, augmentation and faults."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc import Config, ModelError, train
from raytrain_hpc.data.samples.sample_dataset import make_sample_dataset
from raytrain_hpc.data.samples.sample_order import SampleOrder
from raytrain_hpc.data.samples.sample_reader import SampleReader
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.state.keyed_rng import derive_seed
from tests.data.samples import image_task
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

BASE = ["train.steps=8", "train.micro_batch_size=2", "train.deterministic=elastic", "eval.interval=4", "eval.samples=0"]
LAYOUTS = {
    "1": ["cluster.workers=1"],
    "2": ["cluster.workers=2"],
    "3": ["cluster.workers=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
}
VALIDATION = {"clean": image_task.Images(11, 1, augment=False), "noisy": image_task.Images(7, 2)}


def make_images(loss: Any = image_task.loss) -> CustomModel:
    return CustomModel(image_task.build, loss, dataset=make_sample_dataset(image_task.Images(), VALIDATION))


class SentenceModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.table(tokens).cumsum(1))


def build_sentence_model(config: Config) -> nn.Module:
    return SentenceModel()


def pad(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    length = max(len(row["tokens"]) for row in rows)
    padded = [F.pad(torch.tensor(row["tokens"]), (0, length - len(row["tokens"])), value=-100) for row in rows]
    return {"tokens": torch.stack(padded)}


def sentence_loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    targets = batch["tokens"][:, 1:]
    logits = model(batch["tokens"][:, :-1].clamp(min=0))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), (targets != -100).sum()


def make_sentences() -> CustomModel:
    """A Hugging Face table of sentences of different lengths, in buckets by length."""
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, 32, size=generator.integers(2, 20)).tolist() for _ in range(53)]
    table = datasets.Dataset.from_dict({"tokens": rows})
    lengths = [len(row) for row in rows]
    return CustomModel(build_sentence_model, sentence_loss, dataset=make_sample_dataset(table, table, pad, lengths))


CUSTOM = {"images": make_images, "sentences": make_sentences}


def get_losses(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    keys = ("train/loss", "val/loss", "val/clean/loss", "val/noisy/loss")
    return [{key: step[key] for key in keys if key in step} for step in get_step_metrics(records)]


@pytest.fixture(scope="module")
def single_process(pool: WarmPool) -> dict[str, list[dict[str, float]]]:
    return {
        name: get_losses(pool.train(make_small_config(None, *BASE, *LAYOUTS["1"]), custom=make())[0])
        for name, make in CUSTOM.items()
    }


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "1"])
@pytest.mark.parametrize("task", CUSTOM)
def test_every_layout_has_the_bits_of_one_process(pool: WarmPool, single_process: Any, task: str, layout: str) -> None:
    records = pool.train(make_small_config(None, *BASE, *LAYOUTS[layout]), custom=CUSTOM[task]())
    assert get_losses(records[0]) == single_process[task]


def test_reader_processes_give_the_same_bits(single_process: Any, tmp_path: Path) -> None:
    """In this process, since a process of the pool may have no children. The evaluation has two named sets."""
    config = make_small_config(tmp_path, *BASE, "cluster.workers=0", "data.num_readers=2")
    custom = make_images()
    result = train(
        config,
        model=custom.factory,
        loss=custom.loss,
        dataset=image_task.Images(),
        val_dataset=VALIDATION,
        quiet=True,
    )
    last = single_process["images"][-1]
    assert (result.train_loss, result.val_loss) == (last["train/loss"], last["val/loss"])
    assert last["val/loss"] == pytest.approx((11 * last["val/clean/loss"] + 7 * last["val/noisy/loss"]) / 18)


def test_losses_are_those_of_a_plain_loop(pool: WarmPool) -> None:
    """Written without the package but for the order of samples; no dropout, no augmentation, one microbatch."""
    words = ["train.steps=6", "train.micro_batch_size=12", "optimizer.name=sgd", "lr_scheduler.name=constant"]
    words += ["lr_scheduler.warmup_steps=0", "optimizer.lr=0.05", "optimizer.weight_decay=0", "train.max_grad_norm=0"]
    images = image_task.Images(augment=False)
    config = make_small_config(None, *words)
    dataset = make_sample_dataset(images, images)
    custom = CustomModel(build_without_dropout, image_task.weighted_loss, dataset=dataset)
    records = pool.train(config, custom=custom)[0]
    torch.manual_seed(derive_seed(config.run.seed, "model"))  # as the factory is called
    model = build_without_dropout(config)
    order = SampleOrder(len(images), kind="shuffle", seed=config.run.seed, global_batch_size=12, micro_batch_size=12)
    optimizer, expected = torch.optim.SGD(model.parameters(), 0.05), []
    for step in range(6):
        rows = [images[int(index)] for index in order.locate(step, 0)[1]]
        batch = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in ("image", "label")}
        loss_sum, count = image_task.weighted_loss(model, batch)
        (loss_sum / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss_sum / count))
    assert [step["train/loss"] for step in get_step_metrics(records)] == pytest.approx(expected, rel=1e-6)


def build_without_dropout(config: Config) -> nn.Module:
    model = image_task.Classifier()
    model.dropout.p = 0.0
    return model


def test_samples_are_augmented_anew_in_each_epoch_and_alike_in_every_process() -> None:
    reader, indexes = SampleReader(image_task.Images(), None, 5), np.array([4, 9])
    random.seed(1)
    torch.manual_seed(2)
    states = random.getstate(), torch.get_rng_state()
    first, second = (reader.read(np.array(samples), indexes) for samples in ([4, 9], [45, 50]))
    assert torch.equal(first["label"], second["label"]) and not torch.equal(first["image"], second["image"])
    again = reader.__getitems__([(np.array([4, 9]), indexes)])[0]
    assert torch.equal(again["image"], first["image"]) and first["name"] == ["image 4", "image 9"]
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    reader.read(np.array([4]), np.array([4]))
    assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("value", [lambda model, batch: 1.0, lambda model, batch: model(batch["image"])])
def test_wrong_loss_is_named(tmp_path: Path, value: Any) -> None:
    config = make_small_config(tmp_path, "cluster.workers=0")
    with pytest.raises(ModelError, match="loss: return a scalar tensor, the sum of the losses over the samples"):
        train(config, model=image_task.build, loss=value, dataset=image_task.Images(), quiet=True)


def mean_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


@pytest.mark.parametrize(("loss", "is_mean"), [(mean_loss, True), (image_task.loss, False)])
def test_mean_in_place_of_a_sum(pool: WarmPool, loss: Any, is_mean: bool) -> None:
    records = pool.train(
        make_small_config(None, *BASE, "lr_scheduler.warmup_steps=0", "train.steps=1"), custom=make_images(loss)
    )[0]
    warnings = [record["text"] for record in records if record["type"] == "note"]
    assert [text.startswith("warning: loss: it returns a mean") for text in warnings] == [True] * is_mean


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "cluster.workers=0")
    with pytest.raises(ModelError, match="the built-in decoder trains on token shards"):
        train(config, dataset=[1, 2], quiet=True)
    with pytest.raises(ModelError, match="belong to a dataset"):
        train(config, model=image_task.build, loss=image_task.loss, val_dataset=[1], quiet=True)


def test_an_error_of_the_dataset_is_raised(tmp_path: Path) -> None:
    class Broken(image_task.Images):
        def __getitem__(self, index: int) -> dict[str, Any]:
            raise KeyError(f"row {index}")

    config = make_small_config(tmp_path, "cluster.workers=0")
    with pytest.raises(KeyError, match="row "):
        train(config, model=image_task.build, loss=image_task.loss, dataset=Broken(), quiet=True)


def test_ledger_counts_every_sample_once_per_epoch(tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "cluster.workers=0", "train.steps=41", "train.micro_batch_size=4")
    callbacks = [image_task.Ledger()]
    parts: dict[str, Any] = {"loss": image_task.recording_loss, "dataset": image_task.Images()}
    train(config, model=image_task.build, callbacks=callbacks, quiet=True, **parts)
    assert count_epochs(tmp_path) == [Counter(range(image_task.SIZE))] * 12


def count_epochs(run_dir: Path) -> list[Counter[int]]:
    """Return how often each sample occurs in each epoch, from the files of the last commit of each step."""
    indexes: list[int] = []
    steps = sorted({path.name.split("-")[0] for path in (run_dir / "ledger").iterdir()})
    for step in steps:
        entries = [path.read_text().split(" ", 1) for path in sorted((run_dir / "ledger").glob(f"{step}-*"))]
        world_size = int(entries[0][0])
        indexes += [i for _, rows in entries[:world_size] for row in eval(rows) for i in row]
    size = image_task.SIZE
    return [Counter(indexes[first : first + size]) for first in range(0, len(indexes) - size + 1, size)]
