"""What the driver hands to every worker of a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.block_stream import BlockPlan
from raytrain_hpc.data.loader.stream import StreamSpec
from raytrain_hpc.planner.layout import Batching, Layout

if TYPE_CHECKING:
    from torch import Tensor, nn

ModelFactory: TypeAlias = "Callable[[Config], nn.Module]"
LossFunction: TypeAlias = "Callable[[Any, Tensor], Tensor]"


@dataclass(frozen=True)
class CustomModel:
    """A user's own module and loss, instead of the platform's decoder."""

    factory: ModelFactory
    loss: LossFunction


@dataclass(frozen=True)
class Script:
    """A user's own program with a loop of its own, run by every worker from its beginning in every generation."""

    path: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerSpec:
    """One generation of a run. The same for every rank."""

    config: Config
    layout: Layout
    batching: Batching
    model_spec: ModelSpec
    custom: CustomModel | Script | None
    generation: int
    resume_step: int | None  # the published checkpoint to start from; None: start from the first weights
    memory_step: int | None = field(default=None, kw_only=True)  # go on from this step, which ranks hold in memory
    end_step: int  # train until this many steps are committed
    pending_eval_metrics: dict[str, Any] | None = (
        None  # the metrics of the first step, where its evaluation was cut short
    )
    has_pending_checkpoint: bool = False  # whether a checkpoint of the first step is due, and was cut short
    init_checkpoint: Path | None = None  # the checkpoint whose weights a run begins with, that has none of its own
    replication_pairs: tuple[tuple[int, int], ...] = ()  # (rank, the rank that keeps a copy of its snapshots)
    is_single_node: bool = False  # whether all ranks are on one node: they can open each other's memory

    @property
    def is_fresh_start(self) -> bool:
        """Whether it begins with the first weights."""
        return self.memory_step is None and self.resume_step is None

    @property
    def start_step(self) -> int:
        """Steps that are committed when this generation begins."""
        return self.resume_step or 0 if self.memory_step is None else self.memory_step

    @property
    def stream_recipe(self) -> StreamSpec:
        """The training stream."""
        train = self.config.train
        return StreamSpec(
            self.config.data,
            self.model_spec.vocab_size,
            self.config.run.seed,
            train.seq_len,
            train.global_batch,
            self.batching.size,
        )

    @property
    def microbatches_per_rank(self) -> list[int]:
        """How many microbatches each rank has; the same number where all run as many passes."""
        layout = self.layout
        shares = self.batching.split_by_rank(layout.dp_size)
        return [1 if layout.is_lockstep else len(shares[layout.get_dp_rank(rank)]) for rank in range(layout.world_size)]

    @property
    def block_plan(self) -> BlockPlan:
        """How the training data of this generation is cut, where readers deliver it."""
        layout, width = self.layout, 2 if self.model_spec.vocab_size <= 1 << 16 else 4
        return BlockPlan.build(
            self.start_step,
            self.end_step,
            tuple(self.batching.split_by_rank(layout.dp_size)),
            tuple(layout.get_dp_rank(rank) for rank in range(layout.world_size)),
            self.batching.size * (self.config.train.seq_len + 1) * width,
        )
