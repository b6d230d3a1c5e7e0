"""Order of samples of a map-style dataset: every sample once per epoch, the same on any layout; buckets by length."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.data.samples.sample_dataset import SampleStream, make_sample_dataset
from raytrain_hpc.data.samples.sample_order import SampleOrder
from raytrain_hpc.errors import DataError

LENGTHS = np.random.default_rng(0).integers(1, 500, size=103)


def make_order(size: int = 103, **changes: object) -> SampleOrder:
    settings = {"kind": "shuffle", "seed": 7, "global_batch_size": 12, "micro_batch_size": 3}
    return SampleOrder(size, **{**settings, **changes})  # type: ignore[arg-type]


def read(order: SampleOrder, steps: range) -> tuple[list[int], list[int]]:
    """Return sample numbers and indexes of all microbatches of some steps."""
    pairs = [order.locate(step, v) for step in steps for v in range(order.num_microbatches)]
    return [int(i) for s, _ in pairs for i in s], [int(i) for _, indexes in pairs for i in indexes]


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_every_sample_occurs_once_per_epoch(kind: str) -> None:
    samples, indexes = read(make_order(kind=kind), range(103))  # 12 epochs of 103 samples
    assert samples == list(range(103 * 12))
    epochs = [indexes[first : first + 103] for first in range(0, len(indexes), 103)]
    assert all(sorted(epoch) == list(range(103)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) == (kind == "sequential")


@pytest.mark.parametrize("bucket_steps", [1, 4, 16])
def test_buckets_contain_every_sample_once_and_similar_lengths(bucket_steps: int) -> None:
    plain, bucketed = make_order(), make_order(lengths=LENGTHS, bucket_steps=bucket_steps)
    for window in range(6):
        steps = range(window * bucket_steps, (window + 1) * bucket_steps)
        assert sorted(read(bucketed, steps)[0]) == read(plain, steps)[0]
        assert Counter(read(bucketed, steps)[1]) == Counter(read(plain, steps)[1])

    def count_padded(order: SampleOrder) -> int:
        rows = [LENGTHS[order.locate(step, v)[1]] for step in range(64) for v in range(4)]
        return int(sum(row.max() * len(row) - row.sum() for row in rows))

    assert count_padded(bucketed) < count_padded(plain) / (2 if bucket_steps == 1 else 5)


def test_sample_numbers_belong_to_their_indexes_in_buckets() -> None:
    plain, bucketed = make_order(), make_order(lengths=LENGTHS, bucket_steps=4)
    of_sample = dict(zip(*read(plain, range(40)), strict=True))
    samples, indexes = read(bucketed, range(40))
    assert [of_sample[sample] for sample in samples] == indexes


def test_orders_are_as_in_earlier_versions() -> None:
    """Golden values: resumed runs rely on them."""
    assert make_order().locate(5, 2)[1].tolist() == GOLDEN_PLAIN
    assert make_order(lengths=LENGTHS, bucket_steps=4).locate(5, 2)[1].tolist() == GOLDEN_BUCKETED
    assert make_order(kind="random").locate(5, 2)[1].tolist() == GOLDEN_RANDOM


GOLDEN_PLAIN, GOLDEN_BUCKETED, GOLDEN_RANDOM = [10, 96, 69], [76, 36, 43], [62, 91, 19]


def test_mistakes_are_named() -> None:
    with pytest.raises(DataError, match="dataset: int has no __len__ and __getitem__"):
        make_sample_dataset(3)
    with pytest.raises(DataError, match="dataset: it is empty"):
        make_sample_dataset([])
    with pytest.raises(DataError, match="val_dataset dev: generator has no __len__"):
        make_sample_dataset([1], {"dev": (i for i in "ab")})
    with pytest.raises(DataError, match="val_dataset: 'a/b' is no name"):
        make_sample_dataset([1], {"a/b": [1]})
    with pytest.raises(DataError, match=r"lengths: shape \[2\] for a dataset of 103 samples"):
        make_order(lengths=np.array([1, 2]))
    with pytest.raises(DataError, match="cannot be sorted by length"):
        make_order(lengths=LENGTHS, kind="random")
    state = SampleStream(make_sample_dataset([1, 2, 3]), 0, 2).get_state(5)
    assert SampleStream(make_sample_dataset([1, 2, 3]), 0, 2).get_resume_step(state) == 5
    with pytest.raises(DataError, match="trained with another one than this of 4 samples"):
        SampleStream(make_sample_dataset([1, 2, 3, 4]), 0, 2).get_resume_step(state)


def test_lengths_may_be_fractions() -> None:
    """Such as seconds: they are compared as they are."""
    seconds = [0.9, 0.1, 0.8, 0.2, 0.7, 0.3]
    dataset = make_sample_dataset(list(range(6)), lengths=seconds)
    order = dataset.open_order(load_config(None, ["train.global_batch_size=6", "data.bucket_steps=1"]), 2)
    microbatches = {tuple(sorted(order.locate(0, number)[1].tolist())) for number in range(3)}
    assert microbatches == {(1, 3), (4, 5), (0, 2)}
    assert make_sample_dataset([1, 2], lengths=[3.0, 4.0]).lengths.dtype == np.int64
    with pytest.raises(DataError, match="lengths: they must be finite numbers"):
        make_sample_dataset([1, 2], lengths=[1.0, float("nan")])
