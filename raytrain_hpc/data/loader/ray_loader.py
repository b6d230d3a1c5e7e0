"""Ray Data loader: readers on the CPUs of the cluster, and one feeder per generation that serves blocks to ranks.

The feeder runs a Ray Data pipeline (block numbers -> readers, in order) and keeps *references* to a bounded number of
blocks ahead of the slowest rank. A rank reads its block from the object store without a copy. The feeder itself never
loads the tokens.
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
from raytrain_hpc.storage.read_retry import RETRY_TIMEOUT_S, ReadRetry

BLOCKS_PER_EXECUTION = 512  # Ray Data plans all blocks of an execution at once; between two, ranks read locally
_MAX_WINDOW_GROUPS = 64  # limit of groups kept ahead of the slowest rank
_CPU_WAIT_S = 10.0  # CPUs of actors that just ended are reported free with a delay
_POLL_INTERVAL_S = 0.005
_BLOCK_TIMEOUT_S = 1.0  # after this wait, a rank reads the block locally
_REPLY_TIMEOUT_S = 30.0

# ("block", [reference]); ("soon", None): wait; ("later", None): do not wait; ("lost", reason)
Reply = tuple[str, Any]


class BlockReader:
    """Callable for Ray Data that maps a block number to the block. Keeps the shards mapped."""

    def __init__(self, spec: StreamSpec, plan: BlockPlan):
        self._plan = plan
        self._stream: LocalStream = spec.open_stream(spec.open_dataset(ReadRetry(RETRY_TIMEOUT_S)))

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Read the block whose number is the only entry of the batch."""
        group, dp_rank = divmod(int(batch["id"][0]), len(self._plan.microbatches_by_dp_rank))
        return block_to_table(
            self._stream.read_block(self._plan.get_steps(group), self._plan.microbatches_by_dp_rank[dp_rank])
        )


@ray.remote(num_cpus=0, max_restarts=0)
class Feeder:
    """Actor that runs the pipeline of one generation in a thread and serves its blocks to the ranks."""

    def __init__(self, spec: StreamSpec, plan: BlockPlan, num_readers: int | str, max_bytes: int):
        self._spec, self._plan, self._num_readers, self._max_bytes = spec, plan, num_readers, max_bytes
        self._requested_groups = [0] * len(plan.dp_ranks)  # last group requested by each rank
        self._blocks: dict[tuple[int, int], Any] = {}
        self._num_produced = 0  # blocks received from the pipeline
        self._window_groups = 2  # groups kept ahead of the slowest rank; adapted to the block size
        self._failure: str | None = None
        self._condition = threading.Condition()
        threading.Thread(target=self._run, name="pipeline", daemon=True).start()

    def take(self, rank: int, group: int) -> Reply:
        """Return the rank's block of a group, or why there is none. Releases its earlier blocks; never blocks."""
        key = (group, self._plan.dp_ranks[rank])
        with self._condition:
            self._requested_groups[rank] = group
            self._drop_consumed()
            self._condition.notify_all()
            if key in self._blocks:
                return "block", [self._blocks[key]]
            if self._failure is not None:
                return "lost", self._failure
            is_near = (
                self._num_produced > 0
                and abs(group - self._num_produced // len(self._plan.microbatches_by_dp_rank)) <= 1
            )
        return ("soon" if is_near else "later"), None

    def _drop_consumed(self) -> None:
        """Drop the blocks that all their ranks have passed."""
        slowest = [self._plan.stop_step] * len(self._plan.microbatches_by_dp_rank)
        for dp_rank, group in zip(self._plan.dp_ranks, self._requested_groups, strict=True):
            slowest[dp_rank] = min(slowest[dp_rank], group)
        for key in [key for key in self._blocks if key[0] < slowest[key[1]]]:
            del self._blocks[key]

    def _run(self) -> None:
        try:
            num_readers = self._count_available_readers()
            total = self._plan.num_groups * len(self._plan.microbatches_by_dp_rank)
            for first in range(0, total, BLOCKS_PER_EXECUTION):
                for reference, size in _iter_block_refs(
                    self._spec,
                    self._plan,
                    range(first, min(first + BLOCKS_PER_EXECUTION, total)),
                    num_readers,
                    self._max_bytes,
                ):
                    self._store_block(reference, size)
        except Exception as error:  # reported to the ranks, which then read locally
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            with self._condition:
                self._failure = lines[-1] if lines else type(error).__name__

    def _store_block(self, reference: Any, size: int) -> None:
        """Store the next block once it is inside the window of the slowest rank."""
        with self._condition:
            group, dp_rank = divmod(self._num_produced, len(self._plan.microbatches_by_dp_rank))
            self._window_groups = min(
                max(2, self._max_bytes // max(1, size * len(self._plan.microbatches_by_dp_rank))), _MAX_WINDOW_GROUPS
            )
            self._condition.wait_for(lambda: group <= min(self._requested_groups) + self._window_groups)
            self._blocks[group, dp_rank] = reference
            self._num_produced += 1
            self._drop_consumed()

    def _count_available_readers(self) -> int:
        """Return the number of readers that fit. Raises BlocksUnavailableError if no CPU is free."""
        num_wanted = 1 if self._num_readers == AUTO else int(self._num_readers)
        deadline = time.monotonic() + _CPU_WAIT_S
        num_free = _count_free_cpus()
        while num_free < num_wanted and time.monotonic() < deadline:
            time.sleep(0.2)
            num_free = _count_free_cpus()
        if num_free < 1:
            raise BlocksUnavailableError("no CPU is free for readers; leave one free or set data.engine=local")
        if self._num_readers == AUTO:
            num_nodes = len([node for node in ray.nodes() if node["Alive"]])  # type: ignore[no-untyped-call]
            return min(num_free, num_nodes)
        return min(num_free, num_wanted)


def _count_free_cpus() -> int:
    return int(ray.available_resources().get("CPU", 0))  # type: ignore[no-untyped-call]


def _iter_block_refs(
    spec: StreamSpec, plan: BlockPlan, block_numbers: range, num_readers: int, max_bytes: int
) -> Iterator[tuple[Any, int]]:
    """Yield references to the numbered blocks and their bytes, in order, with at most `max_bytes` in flight."""
    import ray.data
    from ray.data import ActorPoolStrategy, DataContext

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = DataContext.get_current()  # affects this process only
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    limits = context.execution_options.resource_limits
    context.execution_options.resource_limits = type(limits)(
        cpu=limits.cpu, gpu=limits.gpu, object_store_memory=max_bytes
    )
    dataset = ray.data.range(len(block_numbers), override_num_blocks=len(block_numbers)).map_batches(
        _SectionReader,
        batch_size=None,
        fn_constructor_args=(spec, plan, block_numbers.start),
        compute=ActorPoolStrategy(size=num_readers),
        num_cpus=1,
    )
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            reference, metadata = entry if isinstance(entry, tuple) else (entry.ref, entry.metadata)
            if metadata.num_rows:
                yield reference, int(metadata.size_bytes or 0)


class _SectionReader(BlockReader):
    """Reader for one execution, whose block numbers start at `first`."""

    def __init__(self, spec: StreamSpec, plan: BlockPlan, first: int):
        super().__init__(spec, plan)
        self._first = first

    def __call__(self, batch: dict[str, Any]) -> Any:
        """Read a block as `BlockReader` does."""
        return super().__call__({"id": batch["id"] + self._first})


def start_feeder(spec: StreamSpec, plan: BlockPlan) -> Any:
    """Start a feeder on this node asynchronously; return its actor handle."""
    strategy = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    data = spec.data
    # Half of the budget for blocks being read, half for blocks that wait to be fetched.
    return Feeder.options(scheduling_strategy=strategy).remote(  # type: ignore[attr-defined]
        spec, plan, data.num_readers, (data.prefetch_mib << 20) // 2
    )


class RayBlockSource:
    """Block source of one rank. Requests the next block while the current one is used."""

    def __init__(self, feeder: Any, plan: BlockPlan, rank: int):
        self.plan = plan
        self._feeder, self._rank = feeder, rank
        self._next_request: tuple[int, Any] | None = None

    def get_block(self, group: int) -> Block | None:
        """Implement `BlockSource.get_block`."""
        deadline = time.monotonic() + _BLOCK_TIMEOUT_S
        request = (
            self._next_request[1]
            if self._next_request is not None and self._next_request[0] == group
            else self._request(group)
        )
        try:
            status, value = ray.get(request, timeout=_REPLY_TIMEOUT_S)
            while status == "soon" and time.monotonic() < deadline:
                time.sleep(_POLL_INTERVAL_S)
                status, value = ray.get(self._request(group), timeout=_REPLY_TIMEOUT_S)
            if status == "lost":
                raise BlocksUnavailableError(value)
            if group + 1 < self.plan.num_groups:
                self._next_request = group + 1, self._request(group + 1)
            return table_to_block(ray.get(value[0], timeout=_REPLY_TIMEOUT_S)) if status == "block" else None
        except GetTimeoutError:
            return None  # slow cluster: the feeder keeps running
        except RayError as error:
            raise BlocksUnavailableError(str(error).splitlines()[0]) from error

    def _request(self, group: int) -> Any:
        return self._feeder.take.remote(self._rank, group)
