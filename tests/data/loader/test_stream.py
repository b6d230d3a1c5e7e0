import json
import pickle
import threading

import numpy as np
import pytest
import torch

from raytrain_hpc.config.schema import DataConfig, SourceConfig
from raytrain_hpc.data.dataset.sources import Dataset, open_dataset
from raytrain_hpc.data.loader.block_stream import BlockPlan, BlockStream
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import build_packing
from raytrain_hpc.data.loader.stream import DataState, open_stream
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.errors import DataError
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.training.device_loader import DeviceLoader


class PositionSource:
    """Source whose tokens are their positions; records the reads."""

    def __init__(self, num_tokens):
        self.num_tokens, self.num_documents, self.masked = num_tokens, 0, False
        self.reads = []

    def read(self, starts, length):
        self.reads.append(starts.copy())
        assert starts.min() >= 0
        assert starts.max() + length <= self.num_tokens
        return starts[:, None] + np.arange(length)


def make_dataset(num_tokens=100_001):
    return Dataset(
        (PositionSource(num_tokens),), None, (1.0,), None, num_tokens, "h", ({"dataset_hash": "h", "weight": 1.0},)
    )


def make_stream(dataset, **changes):
    data = DataConfig(order=changes.pop("order", "shuffle"), stages=changes.pop("stages", []))
    settings = {"seed": 7, "seq_len": 16, "global_batch_size": 24, "micro_batch_size": 4}
    return open_stream(dataset, data, **{**settings, **changes})


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_targets_follow_inputs_and_sample_numbers_are_global(order):
    s = make_stream(make_dataset(), order=order)
    for step, v in ((0, 0), (3, 5), (10**9, 2)):
        m = s.read_microbatch(step, v)
        assert m.inputs.shape == m.targets.shape == (4, 16)
        assert m.inputs.dtype == m.targets.dtype == m.samples.dtype == np.int64
        assert np.array_equal(m.targets, m.inputs + 1)
        assert m.samples.tolist() == list(range(step * 24 + v * 4, step * 24 + v * 4 + 4))
        assert m.valid_tokens == 64


@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_samples_of_a_step_do_not_depend_on_the_micro_batch_size(order):
    single = make_stream(make_dataset(), order=order, micro_batch_size=24)
    for micro_batch_size in (1, 2, 3, 8, 12):
        split = make_stream(make_dataset(), order=order, micro_batch_size=micro_batch_size)
        for step in (0, 259, 260, 10**9):
            parts = [split.read_microbatch(step, v).inputs for v in range(split.num_microbatches)]
            assert np.array_equal(np.concatenate(parts), single.read_microbatch(step, 0).inputs)


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_reading_a_far_step_reads_only_its_windows(order):
    used, fresh = make_dataset(), make_dataset()
    s = make_stream(used, order=order)
    for step in range(20):
        s.read_microbatch(step, 1)
    far = make_stream(fresh, order=order).read_microbatch(10**9, 1)
    assert np.array_equal(far.inputs, s.read_microbatch(10**9, 1).inputs)
    assert [r.size for r in fresh.train[0].reads] == [4]  # no reads for earlier steps


def test_an_epoch_reads_every_target_once():
    s = make_stream(make_dataset(24 * 16 * 5 + 1))
    targets = [s.read_microbatch(k, v).targets.ravel() for k in range(5) for v in range(6)]
    assert np.sort(np.concatenate(targets)).tolist() == list(range(1, 24 * 16 * 5 + 1))


def test_arrays_of_a_microbatch_do_not_share_memory():
    m = make_stream(make_dataset()).read_microbatch(0, 0)
    before = m.inputs.copy()
    m.targets[:] = -100
    assert np.array_equal(m.inputs, before)


def test_data_state_round_trip_and_mismatch_errors():
    s = make_stream(make_dataset())
    state = DataState.from_json(json.loads(json.dumps(s.get_state(12).to_json())))
    assert state == s.get_state(12)
    assert state.to_json() == {
        "seed": 7,
        "next_sample": 288,
        "dataset_hash": "h",
        "mixture": [{"dataset_hash": "h", "weight": 1.0}],
    }
    assert s.get_resume_step(state) == 12
    with pytest.raises(DataError, match="run.seed: .* trained with seed=7, and these settings give 8"):
        make_stream(make_dataset(), seed=8).get_resume_step(state)
    with pytest.raises(DataError, match="next_sample=288 is not a multiple"):
        make_stream(make_dataset(), global_batch_size=20).get_resume_step(state)
    with pytest.raises(DataError, match="not readable"):
        DataState.from_json({"seed": 1})


def test_invalid_microbatches_and_batch_sizes_raise():
    for step, v in ((-1, 0), (0, 6), (0, -1)):
        with pytest.raises(DataError, match=r"microbatches 0\.\.5"):
            make_stream(make_dataset()).read_microbatch(step, v)
    with pytest.raises(DataError, match="micro_batch_size=5: must divide train.global_batch_size=24"):
        make_stream(make_dataset(), micro_batch_size=5)
    with pytest.raises(DataError, match="needs at least 17"):
        make_stream(make_dataset(16))


def test_mixture_reads_sources_in_the_given_proportion(tmp_path):
    texts = {"a": b"a" * 5000, "b": b"b" * 3000}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
        prepare([tmp_path / f"{name}.txt"], tmp_path / name, shard_tokens=700)
    sources = [{"path": str(tmp_path / "a"), "weight": 3}, {"path": str(tmp_path / "b"), "weight": 1}]
    dataset = open_dataset(DataConfig(sources=[SourceConfig(**s) for s in sources]), seed=1)
    s = pickle.loads(pickle.dumps(make_stream(dataset, global_batch_size=1024, micro_batch_size=256)))
    rows = np.concatenate([s.read_microbatch(2, v).inputs for v in range(4)])
    assert (rows == rows[:, :1]).all()  # no row mixes sources
    assert (rows[:, 0] == ord("a")).sum() == 768


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 18, 33, 160, 161, 1000])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_evaluation_counts_every_target_once(num_tokens, batch):
    evaluation = EvaluationSet(PositionSource(num_tokens), build_packing("stream", 16), batch_size=batch)
    batches = [evaluation.get_batch(i) for i in range(evaluation.num_batches)]
    targets = np.concatenate([m.targets.ravel() for m in batches])
    inputs = np.concatenate([m.inputs.ravel() for m in batches])
    valid = targets != -100
    assert targets[valid].tolist() == list(range(1, num_tokens))
    assert np.array_equal(inputs[valid], targets[valid] - 1)
    assert set(inputs[~valid].tolist()) <= {0, num_tokens - 1}  # padding, and the last token
    assert all(m.inputs.shape == m.targets.shape == (batch, 16) for m in batches)
    assert [m.valid_tokens for m in batches] == [(m.targets != -100).sum() for m in batches]
    assert all((m.samples == -1).tolist() == (m.targets == -100).all(axis=1).tolist() for m in batches)


def test_limited_evaluation_spreads_its_samples_evenly():
    evaluation = EvaluationSet(PositionSource(1601), build_packing("stream", 16), batch_size=4, max_samples=10)
    samples = np.concatenate([evaluation.get_batch(i).samples for i in range(evaluation.num_batches)])
    assert samples.tolist() == [*range(0, 100, 10), -1, -1]
    assert EvaluationSet(PositionSource(1601), build_packing("stream", 16), 4, max_samples=1000).num_samples == 100
    with pytest.raises(DataError, match="needs at least 2"):
        EvaluationSet(PositionSource(1), build_packing("stream", 16), 4)
    with pytest.raises(DataError, match="there are 3"):
        evaluation.get_batch(3)


class GroupSource:
    """Block source that has every group of the first rank."""

    def __init__(self, stream, plan):
        self.plan, self._stream, self.threads = plan, stream, set()

    def get_block(self, group):
        self.threads.add(threading.current_thread())
        return self._stream.read_block(self.plan.get_steps(group), self.plan.microbatches_by_dp_rank[0])


def test_one_microbatch_of_a_group_is_read_again_although_it_is_all_that_the_rank_has_in_a_step():
    """The step begins a group: its microbatch has the range of the rank's group."""
    local = make_stream(make_dataset(), global_batch_size=8)
    source = GroupSource(local, BlockPlan(0, 8, 4, (range(1), range(1, 2)), (0, 1)))
    stream = BlockStream(local, source, lambda line: None)
    loader = DeviceLoader(stream, Batching(2, 4), range(1), torch.device("cpu"), DataConfig())
    with loader.prefetch(0, 8):
        for step in range(8):
            batches = [loader.read(step, 0), loader.reread(step, 0), loader.read_microbatch(step, 1)]
            assert [batch.samples.tolist() for batch in batches] == [
                list(range(first, first + 4)) for first in (8 * step, 8 * step, 8 * step + 4)
            ]
            assert torch.equal(batches[0].inputs, batches[1].inputs)
    assert stream.num_delivered == 2 and threading.current_thread() not in source.threads
