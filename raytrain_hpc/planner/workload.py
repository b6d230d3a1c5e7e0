"""What is to be trained, and one way to do so: what cost and memory are functions of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.activation_memory import Recompute
from raytrain_hpc.planner.layout import Batching, Layout

Offload = Literal["none", "cpu", "disk"]


@dataclass(frozen=True)
class Workload:
    """A model and a step of its training: `global_batch` sequences of `seq_len` tokens, computed in `dtype`.

    `compiled`: blocks and loss are. `bucket_bytes`: gradients that plain data parallelism sums together.
    """

    shape: ModelSpec
    seq_len: int
    global_batch: int
    dtype: Literal["fp32", "bf16", "fp64"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    compiled: bool = False
    bucket_bytes: int = 25 << 20

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an element of what is computed."""
        return {"bf16": 2, "fp32": 4, "fp64": 8}[self.dtype]

    @property
    def state_itemsize(self) -> int:
        """Bytes of an element of weights, gradients and moments."""
        return 8 if self.dtype == "fp64" else 4


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, a cut of the batch, and what is done to save memory."""

    layout: Layout
    batching: Batching
    recompute: Recompute = "none"
    offload: Offload = "none"

    @property
    def microbatches_per_rank(self) -> int:
        """Microbatches of a data-parallel rank, the one that has most."""
        return -(-self.batching.count // self.layout.dp_size)


def make_workload(config: Config, shape: ModelSpec) -> Workload:
    """What these settings train."""
    train, bucket = config.train, config.parallel.bucket_mib << 20
    return Workload(shape, train.seq_len, train.global_batch, train.dtype, train.optimizer, train.compile, bucket)
