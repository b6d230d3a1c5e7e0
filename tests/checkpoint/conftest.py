"""A small training state, and ranks that hold uneven shards of it, in one process."""

from __future__ import annotations

import pytest
import torch

from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.shard_io import write_shard
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.state.shard_index import Box, assign_writers
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, get_dtype_name


class FakeRanks:
    """Ranks that shard rows as ceil(rows / degree) and replicate scalars and the embedding."""

    replicated = ("model.embed.weight", "optimizer.step", "optimizer.scale")

    @staticmethod
    def make_tensors(seed):
        """Return the whole tensors by name; their content is a function of the seed."""
        generator = torch.Generator().manual_seed(seed)
        return {
            "model.embed.weight": torch.randn(13, 4, generator=generator),
            "model.wide.weight": torch.randn(20011, 8, generator=generator),
            "model.head.weight": torch.randn(11, 3, 2, generator=generator),
            "model.norm.weight": torch.randn(3, generator=generator).bfloat16(),
            "optimizer.exp_avg.model.head.weight": torch.randn(11, 3, 2, generator=generator, dtype=torch.float64),
            "optimizer.step": torch.tensor(seed),
            "optimizer.scale": torch.tensor(0.5 + seed, dtype=torch.float32),
            "buffers.mask": torch.randn(5, generator=generator) > 0,
        }

    @classmethod
    def shard(cls, tensors, degree):
        """Return the state of each of `degree` ranks."""
        return [
            ShardedState(cls.make_shard(name, tensor, rank, degree) for name, tensor in tensors.items())
            for rank in range(degree)
        ]

    @classmethod
    def make_shard(cls, name, tensor, rank, degree):
        """Return the shard of one tensor that a rank holds."""
        shape = tuple(tensor.shape)
        box = Box.from_shape(shape)
        if name not in cls.replicated:
            step = -(-shape[0] // degree)
            start, end = min(shape[0], rank * step), min(shape[0], (rank + 1) * step)
            box = Box((start, *box.offsets[1:]), (end - start, *shape[1:]))
        local = tensor[box.to_slices(Box.from_shape(shape))].clone()
        return StateShard(name, shape, get_dtype_name(tensor.dtype), box, local)

    @classmethod
    def publish(cls, store, step, *, degree=4, generation=1, pre_publish=lambda: None):
        """Write and publish the checkpoint of a step, as ranks and driver do; its content is a function of the step."""
        reports = cls.write(store, step, degree, generation)
        return store.publish(step, generation, reports, {"data": {"next_sample": step * 32}}, pre_publish)

    @classmethod
    def write(cls, store, step, degree=4, generation=1):
        """Write the shard files of all ranks into the staging directory. Return the reports."""
        states = cls.shard(cls.make_tensors(step), degree)
        writes = assign_writers([state.to_index() for state in states])
        staging = store.create_staging(step, generation)
        return [
            write_shard(staging / get_shard_name(rank), [state.get_shard(*key) for key in assigned])
            for rank, (state, assigned) in enumerate(zip(states, writes, strict=True))
        ]


@pytest.fixture
def ranks():
    return FakeRanks


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")
