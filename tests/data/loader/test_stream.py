import json
import pickle

import numpy as np
import pytest

from raytrain_hpc.config.schema import DataConfig, SourceConfig
from raytrain_hpc.data.dataset.sources import Dataset, open_dataset
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.data.loader.packing import build_packing
from raytrain_hpc.data.loader.stream import DataState, open_stream
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.errors import DataError


class Counting:
    """Tokens that are their own positions, and a record of what was read."""

    def __init__(self, num_tokens):
        self.num_tokens, self.num_documents, self.masked = num_tokens, 0, False
        self.reads = []

    def read(self, starts, length):
        self.reads.append(starts.copy())
        assert starts.min() >= 0
        assert starts.max() + length <= self.num_tokens
        return starts[:, None] + np.arange(length)


def counting(num_tokens=100_001):
    return Dataset(
        (Counting(num_tokens),), None, (1.0,), None, num_tokens, "h", ({"dataset_hash": "h", "weight": 1.0},)
    )


def stream(dataset, **changes):
    data = DataConfig(order=changes.pop("order", "shuffle"), stages=changes.pop("stages", []))
    settings = {"seed": 7, "seq_len": 16, "global_batch": 24, "micro_batch": 4}
    return open_stream(dataset, data, **{**settings, **changes})


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_targets_follow_inputs_and_samples_are_global(order):
    s = stream(counting(), order=order)
    for step, v in ((0, 0), (3, 5), (10**9, 2)):
        m = s.read_microbatch(step, v)
        assert m.inputs.shape == m.targets.shape == (4, 16)
        assert m.inputs.dtype == m.targets.dtype == m.samples.dtype == np.int64
        assert np.array_equal(m.targets, m.inputs + 1)
        assert m.samples.tolist() == list(range(step * 24 + v * 4, step * 24 + v * 4 + 4))
        assert m.valid_tokens == 64


@pytest.mark.parametrize("order", ["shuffle", "sequential"])
def test_a_step_holds_the_same_samples_however_it_is_cut(order):
    whole = stream(counting(), order=order, micro_batch=24)
    for micro_batch in (1, 2, 3, 8, 12):
        cut = stream(counting(), order=order, micro_batch=micro_batch)
        for step in (0, 259, 260, 10**9):
            parts = [cut.read_microbatch(step, v).inputs for v in range(cut.num_microbatches)]
            assert np.array_equal(np.concatenate(parts), whole.read_microbatch(step, 0).inputs)


@pytest.mark.parametrize("order", ["shuffle", "sequential", "random"])
def test_any_step_reads_only_its_own_windows(order):
    used, fresh = counting(), counting()
    s = stream(used, order=order)
    for step in range(20):
        s.read_microbatch(step, 1)
    far = stream(fresh, order=order).read_microbatch(10**9, 1)
    assert np.array_equal(far.inputs, s.read_microbatch(10**9, 1).inputs)
    assert [r.size for r in fresh.train[0].reads] == [4]  # nothing read on the way there


def test_an_epoch_of_steps_reads_every_target_once():
    s = stream(counting(24 * 16 * 5 + 1))
    targets = [s.read_microbatch(k, v).targets.ravel() for k in range(5) for v in range(6)]
    assert np.sort(np.concatenate(targets)).tolist() == list(range(1, 24 * 16 * 5 + 1))


def test_the_arrays_of_a_microbatch_are_its_own():
    m = stream(counting()).read_microbatch(0, 0)
    before = m.inputs.copy()
    m.targets[:] = -100
    assert np.array_equal(m.inputs, before)


def test_state_round_trip_and_refusals():
    s = stream(counting())
    state = DataState.from_json(json.loads(json.dumps(s.get_state(12).to_json())))
    assert state == s.get_state(12)
    assert state.to_json() == {
        "seed": 7,
        "next_sample": 288,
        "dataset_hash": "h",
        "mixture": [{"dataset_hash": "h", "weight": 1.0}],
    }
    assert s.get_resume_step(state) == 12
    with pytest.raises(DataError, match="seed=7 was saved"):
        stream(counting(), seed=8).get_resume_step(state)
    with pytest.raises(DataError, match="next_sample=288 is no multiple"):
        stream(counting(), global_batch=20).get_resume_step(state)
    with pytest.raises(DataError, match="not readable"):
        DataState.from_json({"seed": 1})


def test_microbatches_that_do_not_exist():
    for step, v in ((-1, 0), (0, 6), (0, -1)):
        with pytest.raises(DataError, match=r"microbatches 0\.\.5"):
            stream(counting()).read_microbatch(step, v)
    with pytest.raises(DataError, match="micro_batch=5: must divide train.global_batch=24"):
        stream(counting(), micro_batch=5)
    with pytest.raises(DataError, match="needs at least 17"):
        stream(counting(16))


def test_a_mixture_reads_each_source_where_it_says(tmp_path):
    texts = {"a": b"a" * 5000, "b": b"b" * 3000}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_bytes(text)
        prepare([tmp_path / f"{name}.txt"], tmp_path / name, shard_tokens=700)
    sources = [{"path": str(tmp_path / "a"), "weight": 3}, {"path": str(tmp_path / "b"), "weight": 1}]
    dataset = open_dataset(DataConfig(sources=[SourceConfig(**s) for s in sources]), seed=1)
    s = pickle.loads(pickle.dumps(stream(dataset, global_batch=1024, micro_batch=256)))
    rows = np.concatenate([s.microbatch(2, v).inputs for v in range(4)])
    assert (rows == rows[:, :1]).all()  # no row mixes sources
    assert (rows[:, 0] == ord("a")).sum() == 768


@pytest.mark.parametrize("num_tokens", [2, 16, 17, 18, 33, 160, 161, 1000])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_an_evaluation_counts_every_target_once(num_tokens, batch):
    evaluation = EvaluationSet(Counting(num_tokens), build_packing("stream", 16), batch_size=batch)
    batches = [evaluation.get_batch(i) for i in range(evaluation.num_batches)]
    targets = np.concatenate([m.targets.ravel() for m in batches])
    inputs = np.concatenate([m.inputs.ravel() for m in batches])
    valid = targets != -100
    assert targets[valid].tolist() == list(range(1, num_tokens))
    assert np.array_equal(inputs[valid], targets[valid] - 1)
    assert set(inputs[~valid].tolist()) <= {0, num_tokens - 1}  # padding, and the token that nothing follows
    assert all(m.inputs.shape == m.targets.shape == (batch, 16) for m in batches)
    assert [m.valid_tokens for m in batches] == [(m.targets != -100).sum() for m in batches]
    assert all((m.samples == -1).tolist() == (m.targets == -100).all(axis=1).tolist() for m in batches)


def test_a_limited_evaluation_spreads_its_windows():
    evaluation = EvaluationSet(Counting(1601), build_packing("stream", 16), batch_size=4, max_samples=10)
    samples = np.concatenate([evaluation.get_batch(i).samples for i in range(evaluation.num_batches)])
    assert samples.tolist() == [*range(0, 100, 10), -1, -1]
    assert EvaluationSet(Counting(1601), build_packing("stream", 16), 4, max_samples=1000).num_samples == 100
    with pytest.raises(DataError, match="needs at least 2"):
        EvaluationSet(Counting(1), build_packing("stream", 16), 4)
    with pytest.raises(DataError, match="there are 3"):
        evaluation.get_batch(3)
