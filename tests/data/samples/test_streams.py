"""Streams as datasets: the bits of one process on any layout, exact resume, parts of ranks, and their limits."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from raytrain_hpc import ConfigError, DataError, load_config, train
from raytrain_hpc.config.field import AUTO
from raytrain_hpc.data.samples.sample_dataset import make_sample_dataset
from raytrain_hpc.data.samples.state_format import decode_state, encode_state
from raytrain_hpc.data.samples.stream_reader import StreamReader, count_rows
from raytrain_hpc.data.samples.stream_source import StreamSource
from raytrain_hpc.elastic.state_partition import plan_replication_pairs
from raytrain_hpc.planner.placement import Site
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.training.stream_loader import StreamEvalBatches
from tests.data.samples import image_task, stream_task
from tests.data.samples.test_sample_training import build_sentence_model, get_losses, pad, sentence_loss
from tests.training.test_memory_recovery import run_generation
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config, make_worker_spec

BASE = ["train.steps=8", "train.micro_batch_size=2", "train.deterministic=elastic", "eval.interval=0"]
STOP = 5  # 60 samples: epoch 2 of 41 samples has begun inside step 4


def make_images(stream: Any, validation: Any = None) -> CustomModel:
    return CustomModel(image_task.build, image_task.recording_loss, dataset=make_sample_dataset(stream, validation))


def make_hf_stream(buffer_size: int = 0) -> Any:
    generator = np.random.default_rng(3)
    rows = [generator.integers(0, 32, size=generator.integers(2, 20)).tolist() for _ in range(41)]
    stream = datasets.Dataset.from_dict({"tokens": rows}).to_iterable_dataset(num_shards=4)
    return stream.shuffle(seed=5, buffer_size=buffer_size) if buffer_size else stream


def make_sentences(stream: Any) -> CustomModel:
    return CustomModel(build_sentence_model, sentence_loss, dataset=make_sample_dataset(stream, None, pad))


def split_hf_stream(rank: int, world_size: int) -> Any:
    return split_dataset_by_node(make_hf_stream(), rank, world_size)


def make_loader(rank: int = 0, world_size: int = 1) -> Any:
    return StatefulDataLoader(stream_task.StatefulStream(rank, world_size), batch_size=2)


# name -> how to make the dataset, and whether resuming reads samples again
SHARED: dict[str, tuple[Callable[[], CustomModel], bool]] = {
    "iterable": (lambda: make_images(stream_task.PlainStream()), True),
    "stateful": (lambda: make_images(stream_task.StatefulStream()), False),
    "loader": (lambda: make_images(DataLoader(image_task.Images(), batch_size=2, shuffle=True)), True),
    "seeded loader": (
        lambda: make_images(DataLoader(image_task.Images(), 2, shuffle=True, generator=torch.Generator())),
        True,
    ),
    "stateful loader": (lambda: make_images(StatefulDataLoader(image_task.Images(), 2, shuffle=True)), False),
    "loader of iterable": (lambda: make_images(make_loader()), False),
    "loader that reads again": (lambda: make_images(StatefulDataLoader(stream_task.PlainIterable(), 2)), False),
    "hugging face": (lambda: make_sentences(make_hf_stream()), False),
    "hugging face buffer": (lambda: make_sentences(make_hf_stream(16)), True),
}
PARTS: dict[str, tuple[Callable[[], CustomModel], bool]] = {
    "generator": (lambda: make_images(stream_task.deal_images), True),
    "class": (lambda: make_images(stream_task.StatefulStream), False),
    "loaders": (lambda: make_images(make_loader), False),
    "hugging face parts": (lambda: make_sentences(split_hf_stream), False),
}


def run(
    pool: WarmPool, directory: Path | None, custom: CustomModel, *words: str, **options: Any
) -> tuple[list[float], list[str]]:
    """Train, and return the losses of all steps and the lines about the data."""
    records = pool.train(make_small_config(directory, *BASE, *words), custom=custom, **options)[0]
    notes = [record["text"] for record in records if record["type"] == "note" and record["text"].startswith("data ")]
    return [metrics["train/loss"] for metrics in get_step_metrics(records)], notes


@pytest.fixture(scope="module")
def single_process(pool: WarmPool) -> Callable[[str], list[float]]:
    return cache(lambda name: run(pool, None, SHARED[name][0]())[0])


LAYOUTS = {
    "2": ["cluster.workers=2"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
    "hsdp-4": ["cluster.workers=4", "parallel.zero=2", "parallel.dp_replicate=2"],  # microbatches: 1, 2, 1, 2
}


@pytest.mark.parametrize(
    ("custom", "layout"),
    [
        (lambda: make_images(stream_task.PlainStream()), "hsdp-4"),
        (lambda: make_images(stream_task.deal_images), "2"),  # each rank has a part that no other can read
        (lambda: make_sentences(split_hf_stream), "zero3-3"),
        (lambda: make_images(make_loader), "2"),
        (lambda: make_images(image_task.Images()), "zero3-3"),  # no stream: any rank can read any sample
    ],
    ids=["iterable", "generator", "sentences", "loaders", "samples"],
)
def test_audits_compare_batches_of_any_dataset(
    pool: WarmPool, tmp_path: Path, custom: Callable[[], CustomModel], layout: str
) -> None:
    """No false alarm, and a fault is found and undone."""
    losses, _ = run(pool, None, custom(), *LAYOUTS[layout])
    assert run(pool, None, custom(), *LAYOUTS[layout], "fault.audit_interval=1")[0] == losses
    # One microbatch per rank, which is both the audited one and the one that is hit.
    words = [*BASE, *LAYOUTS[layout], f"train.global_batch_size={2 * int(LAYOUTS[layout][0][-1])}"]
    clean = pool.train(make_small_config(None, *words), custom=custom())[0]
    words += ["fault.inject=[{kind: bitflip_gradient, rank: 1, step: 3, bit: 22}]", "fault.audit_interval=1"]
    records = pool.train(make_small_config(tmp_path, *words), custom=custom())[0]
    assert get_losses(records) == get_losses(clean)
    assert [record["rank"] for record in records if record["type"] == "incident"] == [1]


@pytest.mark.parametrize(
    ("name", "layout"),
    [*product(["iterable", "stateful loader", "hugging face"], ["2", "zero3-3"]), ("loader of iterable", "hsdp-4")],
)
def test_every_layout_has_the_bits_of_one_process(
    pool: WarmPool, single_process: Callable[[str], list[float]], name: str, layout: str
) -> None:
    losses, notes = run(pool, None, SHARED[name][0](), *LAYOUTS[layout])
    assert (losses, notes) == (single_process(name), [])


@pytest.mark.parametrize("name", SHARED)
def test_a_resumed_run_has_the_bits_of_an_undisturbed_one(
    pool: WarmPool, single_process: Callable[[str], list[float]], tmp_path: Path, name: str
) -> None:
    """From 2 ranks to 3 under ZeRO-3, in the middle of the second epoch."""
    make, reads_again = SHARED[name]
    first, _ = run(pool, tmp_path, make(), "cluster.workers=2", steps_to=STOP)
    second, notes = run(pool, tmp_path, make(), "cluster.workers=3", "parallel.zero=3", resume_step=STOP)
    assert first + second == single_process(name)
    is_loader = "loader" in name
    count = STOP * 6 - 21 if is_loader else STOP * 12 - 41  # of the second epoch
    line = f"data    {count} {'batches' if is_loader else 'samples'} of the dataset are read again to resume at step 5"
    assert notes == ([line] if reads_again else [])


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_ranks_resume_exactly_on_as_many_ranks(pool: WarmPool, tmp_path: Path, name: str) -> None:
    make, reads_again = PARTS[name]
    words = ["cluster.workers=3", "parallel.zero=1"]
    undisturbed, _ = run(pool, None, make(), *words)
    first, _ = run(pool, tmp_path, make(), *words, steps_to=STOP)
    second, notes = run(pool, tmp_path, make(), *words, resume_step=STOP)
    assert first + second == undisturbed
    assert [" read again " in note for note in notes] == [True] * reads_again


def test_tensor_parallel_ranks_read_the_same_part(pool: WarmPool) -> None:
    losses = []
    for workers, plan in ((2, None), (4, {"head": "rowwise_split_input"})):
        dataset = make_sample_dataset(stream_task.StatefulStream)
        custom = CustomModel(stream_task.build_without_dropout, image_task.loss, plan, dataset=dataset)
        words = ["train.deterministic=true", f"cluster.workers={workers}", f"parallel.tp={workers // 2}"]
        losses.append(run(pool, None, custom, *words)[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(("name", "layout"), [("class", []), ("loaders", ["parallel.zero=1"]), ("generator", [])])
def test_parts_survive_the_loss_of_a_rank(pool: WarmPool, name: str, layout: list[str]) -> None:
    """Process 1 has lost its memory, and the ranks have changed places."""
    words = ["cluster.workers=3", *layout]
    undisturbed, _ = run(pool, None, PARTS[name][0](), *words)
    config = make_small_config(None, *BASE, *words)
    first = make_worker_spec(config, 3, steps_to=STOP, custom=PARTS[name][0]())
    sites = [Site("", "a")] * 3
    first = replace(first, replication_pairs=plan_replication_pairs(first.layout, sites), max_ranks_per_node=3)
    pool.call(run_generation, 3, [first], (0, 1, 2), (0, 1, 2))
    second = replace(first, memory_step=STOP, end_step=8)
    results = pool.call(run_generation, 3, [second], (2, 0, 1), (1,))
    (records,) = [records for rank, _, _, records in results if rank == 0]
    assert [metrics["train/loss"] for metrics in get_step_metrics(records)] == undisturbed[STOP:]


def read_ledger(directory: Path, step: int) -> list[int]:
    paths = sorted((directory / "ledger").glob(f"{step:05d}-*"))
    return [i for path in paths for row in eval(path.read_text().split(" ", 1)[1]) for i in row]


def test_parts_dealt_round_robin_go_on_exactly_on_fewer_ranks(pool: WarmPool, tmp_path: Path) -> None:
    callbacks = [image_task.Ledger()]
    for workers, options in ((3, {"steps_to": 2}), (2, {"steps_to": 3, "resume_step": 2})):
        custom = make_images(stream_task.deal_images)
        _, notes = run(pool, tmp_path, custom, f"cluster.workers={workers}", callbacks=callbacks, **options)
    assert [sorted(read_ledger(tmp_path, step)) for step in (1, 2, 3)] == [
        list(range(first, first + 12)) for first in (0, 12, 24)
    ]
    assert notes == [
        "data    2 ranks instead of 3 read parts of the dataset: each opens its part anew and skips 12 samples; exact "
        "only if the parts are dealt round-robin"
    ]


def train_locally(directory: Path, dataset: Any, *words: str, **parts: Any) -> Any:
    config = make_small_config(directory, "train.micro_batch_size=2", *words, "cluster.workers=0")
    parts = {"loss": image_task.recording_loss, "quiet": True} | parts
    return train(config, model=image_task.build, dataset=dataset, **parts)


@pytest.mark.parametrize("dataset", [stream_task.PlainStream(), stream_task.StatefulStream], ids=["iterable", "parts"])
def test_a_reader_process_gives_the_same_bits(tmp_path: Path, dataset: Any) -> None:
    """In this process, since a process of the pool may have no children."""
    losses = {}
    for number in (0, 1):
        directory = tmp_path / str(number)
        losses[number] = [
            train_locally(directory, dataset, f"data.num_readers={number}", f"train.steps={steps}").train_loss
            for steps in (4, 7)
        ]
    assert losses[0] == losses[1]


def test_a_rollback_does_not_move_the_stream(tmp_path: Path) -> None:
    """Every sample of the epochs is seen once, that of the step that was rolled back included."""
    words = ["train.steps=7", "checkpoint.interval=2", "fault.on_nan=rollback"]
    words.append(f"fault.inject=[{', '.join(['{kind: nan, rank: 0, step: 4}'] * 2)}]")  # and when recomputed
    result = train_locally(tmp_path, stream_task.PlainStream(), *words, callbacks=[image_task.Ledger()])
    assert result.steps == 7
    indexes = [i for step in range(1, 8) for i in read_ledger(tmp_path, step)]
    assert [Counter(indexes[first : first + 41]) for first in (0, 41)] == [Counter(range(41))] * 2


@pytest.mark.parametrize("samples", [0, 4])
def test_validation_streams_are_read_from_the_beginning(pool: WarmPool, samples: int) -> None:
    """As a list of the same samples in order, with a last batch of one sample and more ranks than batches."""
    rows = [image_task.Images(11, 1, augment=False)[index] for index in range(11)]
    expected, words = None, ["eval.interval=4", f"eval.samples={samples}"]
    sets = {
        "list": rows[: samples or None],
        "stream": stream_task.InOrder(rows),
        "loader": DataLoader(rows, batch_size=2),
        "function": lambda rank, world_size: iter(rows),
    }
    for kind, workers in (("list", 1), ("stream", 3), ("loader", 2), ("function", 3)):
        config = make_small_config(None, *BASE, *words, f"cluster.workers={workers}")
        custom = make_images(image_task.Images(), sets[kind])
        if kind == "function":
            custom = make_images(image_task.Images(), stream_task.read_rows)
        losses = get_losses(pool.train(config, custom=custom)[0])
        expected = expected or losses
        assert losses == expected and "val/loss" in losses[3]


def shuffle_and_augment(rank: int, world_size: int) -> Iterator[Tensor]:
    order = list(range(12))
    random.shuffle(order)
    for index in order:
        yield torch.tensor([index, random.random()])


@pytest.mark.parametrize("count", [2, 3])
def test_a_validation_function_that_draws_random_bits_gives_the_set_of_one_rank(count: int) -> None:
    def evaluate(dp_size: int) -> list[Any]:
        batches = {}
        for rank in range(dp_size):
            source, kept = StreamSource(shuffle_and_augment, "val_dataset"), range(rank, rank + 1)
            reader = StreamReader(source, None, 1, (dp_size, 2), kept, "val")
            eval_batches = StreamEvalBatches(reader, "val_dataset", 0, torch.device("cpu"))
            for index in range(rank, eval_batches.count_batches(0, 8), dp_size):
                batches[index] = eval_batches.get_batch(index, is_padding=False).inputs.tolist()
        return [row for _, batch in sorted(batches.items()) for row in batch]

    assert sorted(index for index, _ in evaluate(1)) == list(range(12))
    assert evaluate(count) == evaluate(1)


class Epochs(IterableDataset[int]):
    """The epochs that were announced, as samples; empty from the third on."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        sample = image_task.Images()[0]
        yield from ({**sample, "index": 10 * self.epoch + index} for index in range(10 if self.epoch < 2 else 0))


def test_epochs_are_announced_and_an_empty_one_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="dataset: epoch 2 of Epochs is empty"):
        train_locally(tmp_path, Epochs(), "train.steps=6", "train.global_batch_size=4", callbacks=[image_task.Ledger()])
    assert [i for step in range(1, 6) for i in read_ledger(tmp_path, step)] == list(range(20))


def test_the_count_of_a_short_batch_is_that_of_its_samples(pool: WarmPool) -> None:
    """An epoch of 5 samples in batches of 2: a step of 3 batches divides its loss by 5."""
    loader = DataLoader(image_task.Images(5, augment=False), batch_size=2)
    words = ["train.steps=1", "train.global_batch_size=6", "lr_scheduler.warmup_steps=0"]
    custom = CustomModel(stream_task.build_without_dropout, image_task.loss, dataset=make_sample_dataset(loader))
    losses, _ = run(pool, None, custom, *words)
    rows = [image_task.Images(5, augment=False)[index] for index in range(5)]
    custom = CustomModel(stream_task.build_without_dropout, image_task.loss, dataset=make_sample_dataset(rows))
    whole, _ = run(pool, None, custom, *words, "train.global_batch_size=5", "train.micro_batch_size=5")
    assert losses == pytest.approx(whole, rel=1e-6)
    assert count_rows({"tokens": torch.zeros(1, 9), "mask": [torch.zeros(3)]}, 2) == 2  # not the samples of a batch


@pytest.mark.parametrize(
    ("dataset", "parts", "words", "error", "message"),
    [
        ((i for i in "ab"), {}, [], DataError, "dataset: generator .* can be iterated only once"),
        (stream_task.PlainStream(), {"lengths": [1] * 41}, [], DataError, "lengths: a stream cannot be sorted"),
        (stream_task.PlainStream(), {}, ["data.order=random"], ConfigError, "a stream has an order of its own"),
        (stream_task.deal_images, {}, ["fault.on_straggler=rebalance"], ConfigError, "on_straggler=.*part .* in order"),
        (DataLoader([1], 3), {}, [], ConfigError, "train.micro_batch_size=2.* yields batches of 3"),
        (DataLoader([1], 2), {}, ["data.num_readers=1"], ConfigError, "data.num_readers=1.*workers of its own"),
        (lambda rank, world_size: 5, {}, [], DataError, "dataset: the function returned int"),
        (lambda rank, world_size: DataLoader([1], 3), {}, [], ConfigError, "micro_batch_size=2.* batches of 3"),
        (stream_task.WithOpenFile(), {}, [], DataError, r"dataset: state_dict\(\)\['file'\] is BytesIO, which"),
        (stream_task.WithLargeState(), {}, [], DataError, "the state_dict of 1 streams has 2.* bytes; at most 1048576"),
        (image_task.Images(), {"val_dataset": stream_task.InOrder([])}, ["eval.interval=1"], DataError, "it is empty"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, dataset: Any, parts: dict[str, Any], words: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_locally(tmp_path, dataset, *words, **parts)


def test_the_batch_size_of_a_loader_is_taken(tmp_path: Path) -> None:
    config = make_small_config(tmp_path, "cluster.workers=0", "train.steps=2")
    loader = DataLoader(image_task.Images(), batch_size=3)
    train(config, model=image_task.build, loss=image_task.loss, dataset=loader, quiet=True)
    assert load_config(tmp_path / "config.yaml").train.micro_batch_size == 3
    assert config.train.micro_batch_size == AUTO, "the caller's config is left as it was"


def test_another_stream_is_refused_on_resume(tmp_path: Path) -> None:
    train_locally(tmp_path, stream_task.PlainStream(), "train.steps=2")
    with pytest.raises(ConfigError, match="trained with other data"):
        train_locally(tmp_path, stream_task.StatefulStream(), "train.steps=3")


def test_ranks_that_read_different_validation_data_are_refused(pool: WarmPool) -> None:
    custom = make_images(image_task.Images(), stream_task.OfThisProcess())
    with pytest.raises(RankFailedError, match="val_dataset: ranks read different numbers of batches"):
        run(pool, None, custom, "cluster.workers=2", "eval.interval=1", "eval.samples=0")


def test_states_are_restored_with_their_types_and_equal_ones_have_equal_text() -> None:
    state = {
        1: (True, None, 2**100, -0.0, float("inf")),
        "bytes": b"\0\1",
        ("a", 2): {"set": {"b", "a"}, "list": [np.int32(5), torch.tensor([[1.5], [2.5]], dtype=torch.bfloat16)]},
        "array": np.arange(6, dtype=np.uint16).reshape(2, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7),
        "generator": np.random.default_rng(1).bit_generator.state,
    }
    text = encode_state(state)
    restored = decode_state(text)
    assert encode_state(restored) == text and list(restored) == list(state)
    assert repr(restored[1]) == repr(state[1]) and restored["generator"] == state["generator"]
    number, tensor = restored["a", 2]["list"]
    assert type(number) is np.int32 and number == 5 and torch.equal(tensor, state["a", 2]["list"][1])
    assert restored["array"].dtype == np.uint16 and np.array_equal(restored["array"], state["array"])
    assert restored["empty"].shape == (0, 3) and int(restored["scalar"]) == 7
