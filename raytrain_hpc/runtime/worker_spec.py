"""What the driver hands to every worker of a generation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from raytrain_hpc.config.model_spec import ModelShape
from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.block_stream import BlockPlan
from raytrain_hpc.data.loader.stream import StreamRecipe
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
    shape: ModelShape
    custom: CustomModel | Script | None
    generation: int
    resume_step: int | None  # the published checkpoint to start from; None: start from the first weights
    memory_step: int | None = field(default=None, kw_only=True)  # go on from this step, which ranks hold in memory
    steps_to: int  # train until this many steps are committed
    unevaluated: dict[str, Any] | None = None  # the metrics of the first step, where its evaluation was cut short
    unsaved: bool = False  # whether a checkpoint of the first step is due, and was cut short
    initial: Path | None = None  # the checkpoint whose weights a run begins with, that has none of its own
    buddies: tuple[tuple[int, int], ...] = ()  # (rank, the rank that keeps a copy of its snapshots)
    one_node: bool = False  # whether all ranks are on one node: they can open each other's memory

    @property
    def fresh(self) -> bool:
        """Whether it begins with the first weights."""
        return self.memory_step is None and self.resume_step is None

    @property
    def first(self) -> int:
        """Steps that are committed when this generation begins."""
        return self.resume_step or 0 if self.memory_step is None else self.memory_step

    @property
    def recipe(self) -> StreamRecipe:
        """The training stream."""
        train = self.config.train
        return StreamRecipe(
            self.config.data,
            self.shape.vocab_size,
            self.config.run.seed,
            train.seq_len,
            train.global_batch,
            self.batching.size,
        )

    @property
    def loads(self) -> list[int]:
        """How many microbatches each rank has; the same number where all run as many passes."""
        layout = self.layout
        shares = self.batching.shares(layout.data_parallel)
        return [1 if layout.lockstep else len(shares[layout.data_rank(rank)]) for rank in range(layout.world)]

    @property
    def blocks(self) -> BlockPlan:
        """How the training data of this generation is cut, where readers deliver it."""
        layout, width = self.layout, 2 if self.shape.vocab_size <= 1 << 16 else 4
        return BlockPlan.of(
            self.first,
            self.steps_to,
            tuple(self.batching.shares(layout.data_parallel)),
            tuple(layout.data_rank(rank) for rank in range(layout.world)),
            self.batching.size * (self.config.train.seq_len + 1) * width,
        )
