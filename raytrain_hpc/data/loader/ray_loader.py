"""Training data through Ray Data: readers on the cluster's CPUs, and one feeder a generation that hands out blocks.

The feeder runs a Ray Data pipeline (numbers of blocks -> readers, in order) and keeps *references* to a bounded number
of blocks beyond the slowest rank; a rank takes its block from the object store without a copy. The feeder itself never
touches the tokens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytrain_hpc.config.schema import AUTO
from raytrain_hpc.data.loader.block_stream import BlockPlan, BlocksUnavailableError, block_to_table, table_to_block
from raytrain_hpc.data.loader.stream import Block, LocalStream, StreamSpec

BLOCKS_PER_EXECUTION = (
    512  # blocks a Ray Data execution, which plans them all at once. Between two, ranks read for themselves
)
_MAX_WINDOW_GROUPS = 64  # groups kept beyond the slowest rank, at most
_CPU_WAIT_S = 10.0  # what other actors held until now can take this long to be counted as free
_POLL_INTERVAL_S = 0.005
_BLOCK_TIMEOUT_S = 1.0  # a rank that has waited this long for a block reads it itself
_REPLY_TIMEOUT_S = 30.0

# ("block", [reference]); ("soon", None), worth waiting for; ("later", None), too far away to be; ("lost", reason)
Reply = tuple[str, Any]


class BlockReader:
    """Ray Data's callable: number of a block -> the block. Holds the shards mapped."""

    def __init__(self, recipe: StreamSpec, plan: BlockPlan):
        self._plan = plan
        self._stream: LocalStream = recipe.open_stream(recipe.open_dataset())

    def __call__(self, batch: dict[str, Any]) -> Any:
        """The block of a batch that holds one number."""
        group, data_rank = divmod(int(batch["id"][0]), len(self._plan.microbatches_per_rank))
        return block_to_table(
            self._stream.read_block(self._plan.get_steps(group), self._plan.microbatches_per_rank[data_rank])
        )


@ray.remote(num_cpus=0, max_restarts=0)
class Feeder:
    """Runs the pipeline of one generation in a thread, and answers ranks meanwhile."""

    def __init__(self, recipe: StreamSpec, plan: BlockPlan, num_readers: int | str, max_bytes: int):
        self._recipe, self._plan, self._num_readers, self._max_bytes = recipe, plan, num_readers, max_bytes
        self._requested_groups = [0] * len(plan.dp_ranks)  # the group that each rank asked for last
        self._blocks: dict[tuple[int, int], Any] = {}
        self._num_produced = 0  # blocks that the pipeline has given
        self._window_groups = 2  # groups kept beyond the slowest rank, once the size of a block is known
        self._failure: str | None = None
        self._condition = threading.Condition()
        threading.Thread(target=self._run, name="pipeline", daemon=True).start()

    def take(self, rank: int, group: int) -> Reply:
        """What there is for a rank that wants its block of a group, and none before it any more. Never waits."""
        key = (group, self._plan.dp_ranks[rank])
        with self._condition:
            self._requested_groups[rank] = group
            self._drop_consumed()
            self._condition.notify_all()
            if key in self._blocks:
                return "block", [self._blocks[key]]
            if self._failure is not None:
                return "lost", self._failure
            near = (
                self._num_produced > 0 and abs(group - self._num_produced // len(self._plan.microbatches_per_rank)) <= 1
            )
        return ("soon" if near else "later"), None

    def _drop_consumed(self) -> None:
        """Forget the blocks that no rank will ask for."""
        slowest = [self._plan.stop] * len(self._plan.microbatches_per_rank)
        for data_rank, group in zip(self._plan.dp_ranks, self._requested_groups, strict=True):
            slowest[data_rank] = min(slowest[data_rank], group)
        for key in [key for key in self._blocks if key[0] < slowest[key[1]]]:
            del self._blocks[key]

    def _run(self) -> None:
        try:
            readers = self._count_available_readers()
            total = self._plan.num_groups * len(self._plan.microbatches_per_rank)
            for first in range(0, total, BLOCKS_PER_EXECUTION):
                for reference, size in _iter_block_refs(
                    self._recipe,
                    self._plan,
                    range(first, min(first + BLOCKS_PER_EXECUTION, total)),
                    readers,
                    self._max_bytes,
                ):
                    self._store_block(reference, size)
        except Exception as error:  # the ranks hear of it, say so, and read for themselves
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            with self._condition:
                self._failure = lines[-1] if lines else type(error).__name__

    def _store_block(self, reference: Any, size: int) -> None:
        """Keep the next block, once the ranks are near enough to it."""
        with self._condition:
            group, data_rank = divmod(self._num_produced, len(self._plan.microbatches_per_rank))
            self._window_groups = min(
                max(2, self._max_bytes // max(1, size * len(self._plan.microbatches_per_rank))), _MAX_WINDOW_GROUPS
            )
            self._condition.wait_for(lambda: group <= min(self._requested_groups) + self._window_groups)
            self._blocks[group, data_rank] = reference
            self._num_produced += 1
            self._drop_consumed()

    def _count_available_readers(self) -> int:
        """How many readers there is room for. Raises Lost where no CPU is free."""
        wanted = 1 if self._num_readers == AUTO else int(self._num_readers)
        until = time.monotonic() + _CPU_WAIT_S
        free = _count_free_cpus()
        while free < wanted and time.monotonic() < until:
            time.sleep(0.2)
            free = _count_free_cpus()
        if free < 1:
            raise BlocksUnavailableError("no CPU is free for them: leave one to them, or set data.engine=local")
        if self._num_readers == AUTO:
            nodes = len([node for node in ray.nodes() if node["Alive"]])  # type: ignore[no-untyped-call]
            return min(free, nodes)
        return min(free, wanted)


def _count_free_cpus() -> int:
    return int(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def _iter_block_refs(
    recipe: StreamSpec, plan: BlockPlan, block_numbers: range, num_readers: int, max_bytes: int
) -> Iterator[tuple[Any, int]]:
    """References to the numbered blocks and their bytes, in order, made ahead within `max_bytes`."""
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()  # this process's own
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    limits = context.execution_options.resource_limits
    context.execution_options.resource_limits = type(limits)(
        cpu=limits.cpu, gpu=limits.gpu, object_store_memory=max_bytes
    )
    dataset = ray.data.range(len(block_numbers), override_num_blocks=len(block_numbers)).map_batches(
        _SectionReader,
        batch_size=None,
        fn_constructor_args=(recipe, plan, block_numbers.start),
        compute=ActorPoolStrategy(size=num_readers),
        num_cpus=1,
    )
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            reference, metadata = entry if isinstance(entry, tuple) else (entry.ref, entry.metadata)
            if metadata.num_rows:
                yield reference, int(metadata.size_bytes or 0)


class _SectionReader(BlockReader):
    """A reader of a section: its numbers begin at `first`."""

    def __init__(self, recipe: StreamSpec, plan: BlockPlan, first: int):
        super().__init__(recipe, plan)
        self._first = first

    def __call__(self, batch: dict[str, Any]) -> Any:
        """As `Reader`."""
        return super().__call__({"id": batch["id"] + self._first})


def start_feeder(recipe: StreamSpec, plan: BlockPlan) -> Any:
    """A feeder on this node; it does not hold the caller up."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    data = recipe.data
    # Half for what is being read, half for what waits to be fetched.
    return Feeder.options(scheduling_strategy=here).remote(  # type: ignore[attr-defined]
        recipe, plan, data.readers, (data.ahead_mib << 20) // 2
    )


class RayBlockSource:
    """A rank's way to its blocks. The next one is asked for while this one is trained on."""

    def __init__(self, feeder: Any, plan: BlockPlan, rank: int):
        self.plan = plan
        self._feeder, self._rank = feeder, rank
        self._next_request: tuple[int, Any] | None = None

    def get_block(self, group: int) -> Block | None:
        """As `Blocks.block`."""
        until = time.monotonic() + _BLOCK_TIMEOUT_S
        asked = (
            self._next_request[1]
            if self._next_request is not None and self._next_request[0] == group
            else self._request(group)
        )
        try:
            answer, value = ray.get(asked, timeout=_REPLY_TIMEOUT_S)
            while answer == "soon" and time.monotonic() < until:
                time.sleep(_POLL_INTERVAL_S)
                answer, value = ray.get(self._request(group), timeout=_REPLY_TIMEOUT_S)
            if answer == "lost":
                raise BlocksUnavailableError(value)
            if group + 1 < self.plan.num_groups:
                self._next_request = group + 1, self._request(group + 1)
            return table_to_block(ray.get(value[0], timeout=_REPLY_TIMEOUT_S)) if answer == "block" else None
        except GetTimeoutError:
            return None  # a slow cluster; the feeder goes on
        except RayError as error:
            raise BlocksUnavailableError(str(error).splitlines()[0]) from error

    def _request(self, group: int) -> Any:
        return self._feeder.take.remote(self._rank, group)
