"""What samples hold under each packing, against slices of the plain arrays."""

import numpy as np
import pytest

from raytrain_hpc.config.schema import DataConfig, StageConfig
from raytrain_hpc.data.dataset.manifest import Manifest
from raytrain_hpc.data.dataset.sources import Dataset
from raytrain_hpc.data.dataset.token_shards import ShardWriter, TokenArray
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import IGNORE_INDEX, build_packing
from raytrain_hpc.data.loader.stream import open_stream
from raytrain_hpc.errors import DataError

SIZES = [5, 1, 40, 17, 16, 3, 90, 2, 31]  # of documents: shorter and longer than a sample, and across shards
TOTAL = sum(SIZES)
TOKENS = np.arange(1000, 1000 + TOTAL)
STOPS = np.cumsum(SIZES)
NUMBER = np.repeat(np.arange(len(SIZES)), SIZES)  # the document of each token
COUNTED = np.arange(TOTAL) % 3 != 0


def source(directory, *, masked=False, shard_tokens=23):
    directory.mkdir(exist_ok=True)
    writer = ShardWriter(directory, "train", "uint16", shard_tokens, masked=masked)
    writer.append(TOKENS, STOPS, COUNTED if masked else None)
    split = {"train": writer.close()}
    return TokenArray.open(directory, Manifest({"name": "byte"}, 256, "uint16", masked, None, {}, (), split), "train")


def dataset(*arrays, weights=None):
    weights = weights or [1.0] * len(arrays)
    mixture = tuple({"dataset_hash": "h", "weight": weight} for weight in weights)
    return Dataset(tuple(arrays), None, tuple(weights), None, 2000, "h", mixture)


def stream(data, array, **changes):
    settings = {"seed": 3, "seq_len": 16, "global_batch": 4, "micro_batch": 2}
    return open_stream(array if isinstance(array, Dataset) else dataset(array), data, **{**settings, **changes})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_documents_are_kept_apart_in_windows(tmp_path, masked, order):
    array = source(tmp_path / "a", masked=masked)
    joined, apart = (stream(DataConfig(order=order, packing=name), array) for name in ("stream", "documents"))
    for step in range(12):
        for v in range(2):
            one, other = joined.read_microbatch(step, v), apart.read_microbatch(step, v)
            assert np.array_equal(one.inputs, other.inputs)
            assert one.document_ids is None
            at = other.inputs - 1000
            assert np.array_equal(other.document_ids, NUMBER[at] - NUMBER[at[:, :1]])
            counts = COUNTED[at + 1] if masked else np.ones_like(at, dtype=bool)
            assert np.array_equal(one.targets, np.where(counts, other.inputs + 1, IGNORE_INDEX))
            inside = NUMBER[at + 1] == NUMBER[at]
            assert np.array_equal(other.targets, np.where(counts & inside, other.inputs + 1, IGNORE_INDEX))
            assert other.valid_tokens == (counts & inside).sum()


@pytest.mark.parametrize("masked", [False, True])
def test_a_document_a_sample(tmp_path, masked):
    array = source(tmp_path / "a", masked=masked)
    assert (
        build_packing("padded", 16).count_truncated(array)
        == build_packing("padded", 16).count_truncated(array, batch_size=2)
        == 3
    )  # above 17
    made = stream(DataConfig(packing="padded"), array, global_batch=9, micro_batch=3)
    assert made.source_sizes == (9,)
    for epoch in range(3):
        rows = [made.read_microbatch(epoch, v) for v in range(3)]
        seen = set()
        for inputs, targets in zip(
            np.concatenate([m.inputs for m in rows]), np.concatenate([m.targets for m in rows]), strict=True
        ):
            number = int(NUMBER[inputs[0] - 1000])
            seen.add(number)
            document = np.arange(STOPS[number] - SIZES[number], STOPS[number])[:17]
            assert inputs[: document.size].tolist() == (1000 + document)[:16].tolist()
            assert (inputs[document.size :] == 0).all()
            expected = np.full(16, IGNORE_INDEX)
            counts = COUNTED[document[1:]] if masked else True
            expected[: document.size - 1] = np.where(counts, 1000 + document[1:], IGNORE_INDEX)
            assert targets.tolist() == expected.tolist()
        assert seen == set(range(9))


@pytest.mark.parametrize("name", ["stream", "documents", "padded"])
@pytest.mark.parametrize("batch", [1, 4])
def test_an_evaluation_counts_what_a_packing_counts_once(tmp_path, name, batch):
    array = source(tmp_path / "a", masked=True)
    made = EvaluationSet(array, build_packing(name, 16), batch)
    targets = np.concatenate([made.get_batch(i).targets.ravel() for i in range(made.num_batches)])
    counted = [i for i in range(1, TOTAL) if COUNTED[i]]
    if name != "stream":
        counted = [i for i in counted if NUMBER[i] == NUMBER[i - 1]]
    if name == "padded":
        counted = [i for i in counted if i - (STOPS[NUMBER[i]] - SIZES[NUMBER[i]]) <= 16]
    assert sorted(targets[targets != IGNORE_INDEX].tolist()) == [1000 + i for i in counted]


def test_a_mixture_of_masked_and_plain_sources(tmp_path):
    both = dataset(source(tmp_path / "a"), source(tmp_path / "b", masked=True))
    made = stream(DataConfig(), both, global_batch=1024, micro_batch=1024)
    targets = made.read_microbatch(0, 0).targets
    plain = (targets != IGNORE_INDEX).all(axis=1)
    assert plain.sum() == 512
    assert (targets[~plain] == IGNORE_INDEX).any(axis=1).all()


def test_stages_change_the_weights_at_whole_blocks_and_no_sample_is_lost(tmp_path):
    both = dataset(source(tmp_path / "a"), source(tmp_path / "b", shard_tokens=1000), weights=[3.0, 1.0])
    stages = [
        StageConfig(from_tokens=16 * 1024 * 2 - 5, weights=[1, 3]),
        StageConfig(from_tokens=16 * 4000, weights=[0, 1]),
    ]
    made = stream(DataConfig(stages=stages, order="shuffle"), both, global_batch=1024, micro_batch=1024)
    sources, numbers = zip(*(made._sampler.locate(made.get_samples(step, 0)) for step in range(6)), strict=True)
    assert [int((block == 1).sum()) for block in sources] == [256, 256, 768, 768, 1024, 1024]
    for which in (0, 1):
        read = np.concatenate([n[s == which] for s, n in zip(sources, numbers, strict=True)])
        size = made.source_sizes[which]
        for epoch in range(len(read) // size):
            assert sorted(read[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    assert made.get_state(2).mixture == ({"dataset_hash": "h", "weight": 3.0}, {"dataset_hash": "h", "weight": 1.0})
    assert made.get_state(3).mixture[1] == {"dataset_hash": "h", "weight": 1.0, "changes": [[2048, 3]]}
    # A stage that is still to come can be changed, one that has begun cannot.
    moved = stream(DataConfig(stages=[*stages[:1]], order="shuffle"), both, global_batch=1024, micro_batch=1024)
    assert moved.get_resume_step(made.get_state(4)) == 4
    with pytest.raises(DataError, match="mixture="):
        moved.get_resume_step(made.get_state(5))
    close = [StageConfig(from_tokens=1, weights=[1, 3]), StageConfig(from_tokens=2, weights=[0, 1])]
    with pytest.raises(DataError, match="at least 1024 samples apart"):
        stream(DataConfig(stages=close), both)


def test_random_draws_follow_the_stage(tmp_path):
    both = dataset(source(tmp_path / "a"), source(tmp_path / "b", masked=True))
    data = DataConfig(order="random", stages=[StageConfig(from_tokens=16 * 1024, weights=[0, 1])])
    made = stream(data, both, global_batch=512, micro_batch=512)
    from_b = [float((made.read_microbatch(step, 0).targets == IGNORE_INDEX).any(axis=1).mean()) for step in range(4)]
    assert 0.4 < from_b[0] < 0.6
    assert 0.4 < from_b[1] < 0.6
    assert from_b[2:] == [1.0, 1.0]


def test_sources_without_a_sample(tmp_path):
    with pytest.raises(DataError, match="source 0 holds 205 tokens and train.seq_len=205 needs at least 206"):
        stream(DataConfig(), source(tmp_path / "a"), seq_len=205)
    nothing = TokenArray([], "uint16")
    with pytest.raises(DataError, match="source 0 knows no documents"):
        stream(DataConfig(packing="padded"), nothing)
