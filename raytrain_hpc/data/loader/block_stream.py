"""Training data read by others: how steps are cut into blocks, and what a rank does with the blocks it is given.

A block holds what one data-parallel rank trains on in some consecutive steps (a *group* of steps). Blocks are
megabytes, so that handing one over costs little beside reading it. Tensor-, pipeline- and context-parallel peers get
the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.loader.packing import SampleRows
from raytrain_hpc.data.loader.stream import Block, LocalStream, Stream
from raytrain_hpc.errors import DataError

BLOCK_BYTES = 4 << 20  # about; below, handing blocks over begins to cost, and far above, so does their memory
_MAX_GROUP_STEPS = 64  # at most: a worker begins with a whole group


@dataclass(frozen=True)
class BlockPlan:
    """The steps [first, stop) of a generation in groups of `group_steps`; `shares`: the microbatches of each
    data-parallel rank; `data_ranks`: for each rank, which of the shares it trains on."""

    first: int
    stop: int
    group_steps: int
    microbatches_per_rank: tuple[range, ...]
    dp_ranks: tuple[int, ...]

    @classmethod
    def build(
        cls,
        first: int,
        stop: int,
        microbatches_per_rank: tuple[range, ...],
        dp_ranks: tuple[int, ...],
        microbatch_bytes: int,
    ) -> BlockPlan:
        """With groups as long as give a rank about BLOCK_BYTES."""
        steps = BLOCK_BYTES // (microbatch_bytes * max(len(share) for share in microbatches_per_rank))
        return cls(first, stop, min(max(1, steps), _MAX_GROUP_STEPS), microbatches_per_rank, dp_ranks)

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return -(-(self.stop - self.first) // self.group_steps)

    def get_steps(self, group: int) -> range:
        """The steps of a group."""
        first = self.first + group * self.group_steps
        return range(first, min(first + self.group_steps, self.stop))


class BlocksUnavailableError(Exception):
    """Nobody will deliver blocks any more; the message says why."""


class BlockSource(Protocol):
    """Where a rank asks for its blocks."""

    plan: BlockPlan

    def get_block(self, group: int) -> Block | None:
        """The rank's block of a group; None where whoever reads is not that far yet. Raises Lost."""


class BlockStream(Stream):
    """Blocks as they are delivered; what is not delivered is read here. The bytes are the same either way."""

    def __init__(self, local: LocalStream, source: BlockSource, log: Callable[[str], None]):
        """`note` is told, in one line, when blocks begin to come, and when they stop."""
        self._local, self._source, self._log = local, source, log
        self.micro_batch = local.micro_batch
        self._is_disconnected = False
        self.num_delivered = 0  # groups that came as blocks

    def iter_blocks(self, steps: range, microbatches: range, max_microbatches: int) -> Generator[Block, None, None]:
        """As `Stream.blocks`."""
        plan = self._source.plan
        if microbatches not in plan.microbatches_per_rank or (steps.start - plan.first) % plan.group_steps:
            yield from self._local.iter_blocks(
                steps, microbatches, max_microbatches
            )  # no whole groups: a single microbatch was asked for
            return
        for start in range(steps.start, steps.stop, plan.group_steps):
            some = range(start, min(start + plan.group_steps, steps.stop))
            block = None if self._is_disconnected else self._get_block((start - plan.first) // plan.group_steps)
            if block is None:
                yield from self._local.iter_blocks(some, microbatches, max_microbatches)
                continue
            self._check_samples(block, some, microbatches)
            if not self.num_delivered:
                self._log(f"data: readers deliver from step {some.start + 1} on")
            self.num_delivered += 1
            yield from block.split(max_microbatches * self.micro_batch)

    def _get_block(self, group: int) -> Block | None:
        try:
            return self._source.get_block(group)
        except BlocksUnavailableError as reason:
            self._is_disconnected = True
            self._log(f"data: readers lost ({reason}); every worker reads for itself from here on")
            return None

    def _check_samples(self, block: Block, steps: range, microbatches: range) -> None:
        due = self._local.get_samples_of_steps(steps, microbatches)
        if not np.array_equal(block.samples, due):
            found = f"{block.samples[:1]}..{block.samples[-1:]} ({len(block.samples)})"
            raise DataError(
                f"steps {steps.start}..{steps.stop - 1}: a block of samples {found} was delivered where "
                f"{due[0]}..{due[-1]} ({len(due)}) are due"
            )


def block_to_table(block: Block) -> pa.Table:
    """A block as an Arrow table with a row a sample, in the stored types."""
    rows = block.rows
    columns = {"samples": pa.array(block.samples), "tokens": _to_arrow_column(rows.tokens)}
    if rows.document_ids is not None:
        columns["documents"] = _to_arrow_column(rows.document_ids.astype(np.int32))
    if rows.loss_mask is not None:
        columns["counted"] = _to_arrow_column(rows.loss_mask.view(np.uint8))
    return pa.table(columns)


def table_to_block(table: pa.Table) -> Block:
    """What `table_of` made a table of; tokens in place where they lie."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    held = {name: _to_matrix(column) for name, column in columns.items() if name != "samples"}
    counted = held.get("counted")
    rows = SampleRows(held["tokens"], held.get("documents"), None if counted is None else counted.view(np.bool_))
    return Block(columns["samples"].to_numpy().copy(), rows)  # the only part that becomes a tensor as it is


def _to_arrow_column(matrix: npt.NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def _to_matrix(column: pa.Array) -> npt.NDArray[Any]:
    flat: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=True)
    return flat.reshape(len(column), -1)
