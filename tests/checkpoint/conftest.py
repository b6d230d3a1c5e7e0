"""A small training state, and ranks that hold uneven parts of it, in one process."""

from __future__ import annotations

import pytest
import torch

from raytrain_hpc.checkpoint.manifest import get_shard_name
from raytrain_hpc.checkpoint.shard_io import write_shard
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.state.shard_index import Box, assign_writers
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, dtype_name


class Ranks:
    """Row-sharded over `degree` ranks as ceil(rows / degree), scalars and the embedding replicated."""

    replicated = ("model.embed.weight", "optimizer.step", "optimizer.scale")

    @staticmethod
    def state(seed):
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
    def holdings(cls, state, degree):
        return [
            ShardedState(cls.part(name, whole, rank, degree) for name, whole in state.items()) for rank in range(degree)
        ]

    @classmethod
    def part(cls, name, whole, rank, degree):
        shape = tuple(whole.shape)
        box = Box.from_shape(shape)
        if name not in cls.replicated:
            step = -(-shape[0] // degree)
            start, end = min(shape[0], rank * step), min(shape[0], (rank + 1) * step)
            box = Box((start, *box.offsets[1:]), (end - start, *shape[1:]))
        return StateShard(
            name, shape, dtype_name(whole.dtype), box, whole[box.to_slices(Box.from_shape(shape))].clone()
        )

    @classmethod
    def publish(cls, store, step, *, degree=4, generation=1, guard=lambda: None):
        """What ranks and driver do together; the content is a function of the step."""
        return store.publish(
            step, generation, cls.write(store, step, degree, generation), {"data": {"next_sample": step * 32}}, guard
        )

    @classmethod
    def write(cls, store, step, degree=4, generation=1):
        holdings = cls.holdings(cls.state(step), degree)
        writes = assign_writers([holding.to_index() for holding in holdings])
        staging = store.staging(step, generation)
        return [
            write_shard(staging / get_shard_name(rank), [holding.get_shard(*key) for key in mine])
            for rank, (holding, mine) in enumerate(zip(holdings, writes, strict=True))
        ]


@pytest.fixture
def ranks():
    return Ranks


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints")
