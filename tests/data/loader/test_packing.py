"""Content of samples under each packing, compared with slices of the original arrays."""

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
DOCUMENT_IDS = np.repeat(np.arange(len(SIZES)), SIZES)  # the document of each token
LOSS_MASK = np.arange(TOTAL) % 3 != 0


def make_source(directory, *, masked=False, shard_tokens=23):
    directory.mkdir(exist_ok=True)
    writer = ShardWriter(directory, "train", "uint16", shard_tokens, masked=masked)
    writer.append(TOKENS, STOPS, LOSS_MASK if masked else None)
    split = {"train": writer.close()}
    return TokenArray.open(directory, Manifest({"name": "byte"}, 256, "uint16", masked, None, {}, (), split), "train")


def make_dataset(*arrays, weights=None):
    weights = weights or [1.0] * len(arrays)
    mixture = tuple({"dataset_hash": "h", "weight": weight} for weight in weights)
    return Dataset(tuple(arrays), None, tuple(weights), None, 2000, "h", mixture)


def make_stream(data, array, **changes):
    settings = {"seed": 3, "seq_len": 16, "global_batch_size": 4, "micro_batch_size": 2}
    return open_stream(array if isinstance(array, Dataset) else make_dataset(array), data, **{**settings, **changes})


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", ["shuffle", "random"])
def test_documents_packing_masks_targets_across_documents(tmp_path, masked, order):
    array = make_source(tmp_path / "a", masked=masked)
    plain_stream, separated_stream = (
        make_stream(DataConfig(order=order, packing=name), array) for name in ("stream", "documents")
    )
    for step in range(12):
        for v in range(2):
            plain, separated = plain_stream.read_microbatch(step, v), separated_stream.read_microbatch(step, v)
            assert np.array_equal(plain.inputs, separated.inputs)
            assert plain.document_ids is None
            positions = separated.inputs - 1000
            assert np.array_equal(separated.document_ids, DOCUMENT_IDS[positions] - DOCUMENT_IDS[positions[:, :1]])
            is_target = LOSS_MASK[positions + 1] if masked else np.ones_like(positions, dtype=bool)
            assert np.array_equal(plain.targets, np.where(is_target, separated.inputs + 1, IGNORE_INDEX))
            same_document = DOCUMENT_IDS[positions + 1] == DOCUMENT_IDS[positions]
            assert np.array_equal(
                separated.targets, np.where(is_target & same_document, separated.inputs + 1, IGNORE_INDEX)
            )
            assert separated.valid_tokens == (is_target & same_document).sum()


@pytest.mark.parametrize("masked", [False, True])
def test_padded_packing_gives_one_document_per_sample(tmp_path, masked):
    array = make_source(tmp_path / "a", masked=masked)
    assert (
        build_packing("padded", 16).count_truncated(array)
        == build_packing("padded", 16).count_truncated(array, batch_size=2)
        == 3
    )  # above 17
    stream = make_stream(DataConfig(packing="padded"), array, global_batch_size=9, micro_batch_size=3)
    assert stream.source_sizes == (9,)
    for epoch in range(3):
        rows = [stream.read_microbatch(epoch, v) for v in range(3)]
        documents_read = set()
        for inputs, targets in zip(
            np.concatenate([m.inputs for m in rows]), np.concatenate([m.targets for m in rows]), strict=True
        ):
            number = int(DOCUMENT_IDS[inputs[0] - 1000])
            documents_read.add(number)
            document = np.arange(STOPS[number] - SIZES[number], STOPS[number])[:17]
            assert inputs[: document.size].tolist() == (1000 + document)[:16].tolist()
            assert (inputs[document.size :] == 0).all()
            expected = np.full(16, IGNORE_INDEX)
            counts = LOSS_MASK[document[1:]] if masked else True
            expected[: document.size - 1] = np.where(counts, 1000 + document[1:], IGNORE_INDEX)
            assert targets.tolist() == expected.tolist()
        assert documents_read == set(range(9))


@pytest.mark.parametrize("name", ["stream", "documents", "padded"])
@pytest.mark.parametrize("batch", [1, 4])
def test_evaluation_counts_every_target_of_a_packing_once(tmp_path, name, batch):
    array = make_source(tmp_path / "a", masked=True)
    evaluation = EvaluationSet(array, build_packing(name, 16), batch)
    targets = np.concatenate([evaluation.get_batch(i).targets.ravel() for i in range(evaluation.num_batches)])
    expected = [i for i in range(1, TOTAL) if LOSS_MASK[i]]
    if name != "stream":
        expected = [i for i in expected if DOCUMENT_IDS[i] == DOCUMENT_IDS[i - 1]]
    if name == "padded":
        expected = [i for i in expected if i - (STOPS[DOCUMENT_IDS[i]] - SIZES[DOCUMENT_IDS[i]]) <= 16]
    assert sorted(targets[targets != IGNORE_INDEX].tolist()) == [1000 + i for i in expected]


def test_mixture_of_masked_and_unmasked_sources(tmp_path):
    mixture = make_dataset(make_source(tmp_path / "a"), make_source(tmp_path / "b", masked=True))
    stream = make_stream(DataConfig(), mixture, global_batch_size=1024, micro_batch_size=1024)
    targets = stream.read_microbatch(0, 0).targets
    is_unmasked = (targets != IGNORE_INDEX).all(axis=1)
    assert is_unmasked.sum() == 512
    assert (targets[~is_unmasked] == IGNORE_INDEX).any(axis=1).all()


def test_stages_change_weights_at_whole_blocks_and_lose_no_sample(tmp_path):
    mixture = make_dataset(
        make_source(tmp_path / "a"), make_source(tmp_path / "b", shard_tokens=1000), weights=[3.0, 1.0]
    )
    stages = [
        StageConfig(from_tokens=16 * 1024 * 2 - 5, weights=[1, 3]),
        StageConfig(from_tokens=16 * 4000, weights=[0, 1]),
    ]
    stream = make_stream(
        DataConfig(stages=stages, order="shuffle"), mixture, global_batch_size=1024, micro_batch_size=1024
    )
    sources, numbers = zip(*(stream._sampler.locate(stream.get_samples(step, 0)) for step in range(6)), strict=True)
    assert [int((block == 1).sum()) for block in sources] == [256, 256, 768, 768, 1024, 1024]
    for source in (0, 1):
        read = np.concatenate([n[s == source] for s, n in zip(sources, numbers, strict=True)])
        size = stream.source_sizes[source]
        for epoch in range(len(read) // size):
            assert sorted(read[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    assert stream.get_state(2).mixture == ({"dataset_hash": "h", "weight": 3.0}, {"dataset_hash": "h", "weight": 1.0})
    assert stream.get_state(3).mixture[1] == {"dataset_hash": "h", "weight": 1.0, "changes": [[2048, 3]]}
    # A future stage can be changed, one that has begun cannot.
    changed_stream = make_stream(
        DataConfig(stages=[*stages[:1]], order="shuffle"), mixture, global_batch_size=1024, micro_batch_size=1024
    )
    assert changed_stream.get_resume_step(stream.get_state(4)) == 4
    with pytest.raises(DataError, match="mixture="):
        changed_stream.get_resume_step(stream.get_state(5))
    close_stages = [StageConfig(from_tokens=1, weights=[1, 3]), StageConfig(from_tokens=2, weights=[0, 1])]
    with pytest.raises(DataError, match="at least 1024 samples apart"):
        make_stream(DataConfig(stages=close_stages), mixture)


def test_random_order_follows_the_stage_weights(tmp_path):
    mixture = make_dataset(make_source(tmp_path / "a"), make_source(tmp_path / "b", masked=True))
    data = DataConfig(order="random", stages=[StageConfig(from_tokens=16 * 1024, weights=[0, 1])])
    stream = make_stream(data, mixture, global_batch_size=512, micro_batch_size=512)
    from_b = [float((stream.read_microbatch(step, 0).targets == IGNORE_INDEX).any(axis=1).mean()) for step in range(4)]
    assert 0.4 < from_b[0] < 0.6
    assert 0.4 < from_b[1] < 0.6
    assert from_b[2:] == [1.0, 1.0]


def test_sources_without_a_sample_raise(tmp_path):
    with pytest.raises(DataError, match="data.path=stdlib: it holds 205 tokens, and train.seq_len=205 needs at"):
        make_stream(DataConfig(), make_source(tmp_path / "a"), seq_len=205)
    empty_source = TokenArray([], "uint16")
    with pytest.raises(DataError, match="data.path=stdlib: it has no documents"):
        make_stream(DataConfig(packing="padded"), empty_source)
