"""Worker spec: the description of a generation that the driver sends to every worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.block_stream import BlockPlan
from raytrain_hpc.data.loader.stream import StreamSpec
from raytrain_hpc.data.samples.sample_dataset import SampleDataset
from raytrain_hpc.errors import ModelError
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.snapshot.shared_file import SnapshotHandles
from raytrain_hpc.storage.location import Location

if TYPE_CHECKING:
    from torch import nn

ModelFactory: TypeAlias = "Callable[[Config], nn.Module]"
LossFunction: TypeAlias = "Callable[[Any, Any], Any]"
ForwardFunction: TypeAlias = "Callable[[nn.Module, Any], Any]"


@dataclass(frozen=True)
class DatasetReference:
    """Ray's reference to the SampleDataset of a run, which it carries in place of the dataset on its way to workers."""

    object_ref: Any


@dataclass(frozen=True)
class CustomModel:
    """A user's module and loss, trained instead of the decoder, on tokens or on a dataset of the user."""

    factory: ModelFactory
    loss: LossFunction
    plan: Mapping[str, str] | None = None  # blocks and tensor parallelism: see parallel/module_plan.py
    dataset: SampleDataset | DatasetReference | None = None  # of the user; None: the token shards of the config
    run: ForwardFunction | None = None  # (module, batch) -> output; None: the module is called with the tokens
    hf_config: dict[str, Any] | None = None  # config.json of a transformers model

    def __post_init__(self) -> None:
        """Raise ModelError for a module in place of its factory, and for parts that cannot be called."""
        from torch import nn

        if isinstance(self.factory, nn.Module):
            name = type(self.factory).__name__
            raise ModelError(
                f"model={name}(...): a module; pass a function that builds it on every worker, such as "
                f"model=lambda config: {name}(...)"
            )
        if not callable(self.factory):
            raise ModelError(f"model={self.factory!r}: cannot be called; pass a function of the config that builds it")
        if not callable(self.loss):
            raise ModelError(f"loss={self.loss!r}: cannot be called; pass a function that returns a sum of losses")


@dataclass(frozen=True)
class Script:
    """A user's script with its own training loop. Every worker runs it from its beginning in every generation."""

    path: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint in node-local storage to resume from.

    `name`: that of its manifest in the catalog, and of its directory on each node. `files_by_rank`: the files on the
    node of each rank, verified.
    """

    name: str
    files_by_rank: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class WorkerSpec:
    """One generation of a run, the same for every rank."""

    config: Config
    layout: Layout
    batching: Batching
    model_spec: ModelSpec
    dataset_hash: str = field(kw_only=True)  # of the data with which the run was started
    custom: CustomModel | Script | None
    generation: int
    resume_step: int | None  # the published checkpoint to start from; None: start from initial weights
    local_checkpoint: LocalCheckpoint | None = field(default=None, kw_only=True)  # where that of resume_step is
    memory_step: int | None = field(default=None, kw_only=True)  # recover this step from the memory of ranks
    end_step: int  # train until this many steps are committed
    callbacks: tuple[Callback, ...] = ()  # of the user; every rank gets its own copies
    lr_schedule: Callable[[int], float] | None = None  # of the user, instead of lr_scheduler.name
    start_metrics: dict[str, Any] | None = None  # recorded metrics of the start step, for callbacks; None: unknown
    pending_eval_metrics: dict[str, Any] | None = None  # metrics of the start step, if its evaluation was interrupted
    has_pending_checkpoint: bool = False  # whether a checkpoint of the start step was interrupted
    listed_local_checkpoints: tuple[str, ...] = ()  # in the catalog; others of earlier generations are leftovers
    init_checkpoint: Location | None = None  # weights that a fresh run starts from
    replication_pairs: tuple[tuple[int, int], ...] = ()  # (rank, the rank that holds a replica of its snapshots)
    last_checkpoint_time: float = 0.0  # Unix time of the last checkpoint, or of the start of the run; 0: unknown
    verified_step: int = 0  # no rank has computed wrong by this step, as far as audits tell
    # A rank and a spare disagree about the step after this one: audit the first step, and sample that one again.
    disputed_step: int | None = None
    max_ranks_per_node: int = 1  # largest number of ranks on one node
    memory_generation: int | None = None  # the generation whose state of memory_step is restored; None: any
    # By rank: snapshots of lost ranks that the agent of its node holds, and that this rank is to open.
    held_snapshots: Mapping[int, tuple[SnapshotHandles, ...]] = field(default_factory=dict)

    @property
    def is_fresh_start(self) -> bool:
        """Whether training starts from initial weights."""
        return self.memory_step is None and self.resume_step is None

    @property
    def is_start_unpublished(self) -> bool:
        """Whether run.dir may have no checkpoint of the start step: it comes from memory or node-local storage."""
        return self.memory_step is not None or self.local_checkpoint is not None

    @property
    def is_single_node(self) -> bool:
        """Whether all ranks are on one node, where they can open each other's shared memory."""
        return self.max_ranks_per_node == self.layout.world_size

    @property
    def start_step(self) -> int:
        """Number of committed steps when this generation begins."""
        return self.resume_step or 0 if self.memory_step is None else self.memory_step

    @property
    def stream_spec(self) -> StreamSpec:
        """Recipe of the training stream."""
        train = self.config.train
        return StreamSpec(
            self.config.data,
            self.model_spec.vocab_size,
            self.config.run.seed,
            train.seq_len,
            train.global_batch_size,
            self.batching.size,
            self.dataset_hash,
        )

    @property
    def num_microbatches_by_rank(self) -> list[int]:
        """Microbatches of each rank per step, as a measure of its load; all 1 if every rank runs the same number."""
        layout = self.layout
        microbatches_by_dp_rank = self.batching.split_by_rank(layout.dp_size)
        return [
            1 if layout.is_lockstep else len(microbatches_by_dp_rank[layout.get_dp_rank(rank)])
            for rank in range(layout.world_size)
        ]

    @property
    def block_plan(self) -> BlockPlan:
        """Partition of this generation's training data into blocks, used if readers deliver them; none of own data."""
        has_own_data = isinstance(self.custom, CustomModel) and self.custom.dataset is not None
        layout, token_bytes = self.layout, 2 if self.model_spec.vocab_size <= 1 << 16 else 4
        return BlockPlan.build(
            self.start_step,
            self.start_step if has_own_data else self.end_step,
            tuple(self.batching.split_by_rank(layout.dp_size)),
            tuple(layout.get_dp_rank(rank) for rank in range(layout.world_size)),
            self.batching.size * (self.config.train.seq_len + 1) * token_bytes,
        )
