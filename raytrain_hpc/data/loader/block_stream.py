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

from raytrain_hpc.data.loader.packing import Rows
from raytrain_hpc.data.loader.stream import Block, LocalStream, Stream
from raytrain_hpc.errors import DataError

BLOCK_BYTES = 4 << 20  # about; below, handing blocks over begins to cost, and far above, so does their memory
_STEPS_A_GROUP = 64  # at most: a worker begins with a whole group


@dataclass(frozen=True)
class BlockPlan:
    """The steps [first, stop) of a generation in groups of `group_steps`; `shares`: the microbatches of each
    data-parallel rank; `data_ranks`: for each rank, which of the shares it trains on."""

    first: int
    stop: int
    group_steps: int
    shares: tuple[range, ...]
    data_ranks: tuple[int, ...]

    @classmethod
    def of(
        cls, first: int, stop: int, shares: tuple[range, ...], data_ranks: tuple[int, ...], microbatch_bytes: int
    ) -> BlockPlan:
        """With groups as long as give a rank about BLOCK_BYTES."""
        steps = BLOCK_BYTES // (microbatch_bytes * max(len(share) for share in shares))
        return cls(first, stop, min(max(1, steps), _STEPS_A_GROUP), shares, data_ranks)

    @property
    def groups(self) -> int:
        """How many groups there are."""
        return -(-(self.stop - self.first) // self.group_steps)

    def steps(self, group: int) -> range:
        """The steps of a group."""
        first = self.first + group * self.group_steps
        return range(first, min(first + self.group_steps, self.stop))


class Lost(Exception):
    """Nobody will deliver blocks any more; the message says why."""


class Blocks(Protocol):
    """Where a rank asks for its blocks."""

    plan: BlockPlan

    def block(self, group: int) -> Block | None:
        """The rank's block of a group; None where whoever reads is not that far yet. Raises Lost."""


class DeliveredStream(Stream):
    """Blocks as they are delivered; what is not delivered is read here. The bytes are the same either way."""

    def __init__(self, local: LocalStream, blocks: Blocks, note: Callable[[str], None]):
        """`note` is told, in one line, when blocks begin to come, and when they stop."""
        self._local, self._blocks, self._note = local, blocks, note
        self.micro_batch = local.micro_batch
        self._lost = False
        self.delivered = 0  # groups that came as blocks

    def blocks(self, steps: range, share: range, most: int) -> Generator[Block, None, None]:
        """As `Stream.blocks`."""
        plan = self._blocks.plan
        if share not in plan.shares or (steps.start - plan.first) % plan.group_steps:
            yield from self._local.blocks(steps, share, most)  # no whole groups: a single microbatch was asked for
            return
        for start in range(steps.start, steps.stop, plan.group_steps):
            some = range(start, min(start + plan.group_steps, steps.stop))
            block = None if self._lost else self._deliver((start - plan.first) // plan.group_steps)
            if block is None:
                yield from self._local.blocks(some, share, most)
                continue
            self._check(block, some, share)
            if not self.delivered:
                self._note(f"data: readers deliver from step {some.start + 1} on")
            self.delivered += 1
            yield from block.parts(most * self.micro_batch)

    def _deliver(self, group: int) -> Block | None:
        try:
            return self._blocks.block(group)
        except Lost as reason:
            self._lost = True
            self._note(f"data: readers lost ({reason}); every worker reads for itself from here on")
            return None

    def _check(self, block: Block, steps: range, share: range) -> None:
        due = self._local.samples_of(steps, share)
        if not np.array_equal(block.samples, due):
            found = f"{block.samples[:1]}..{block.samples[-1:]} ({len(block.samples)})"
            raise DataError(
                f"steps {steps.start}..{steps.stop - 1}: a block of samples {found} was delivered where "
                f"{due[0]}..{due[-1]} ({len(due)}) are due"
            )


def table_of(block: Block) -> pa.Table:
    """A block as an Arrow table with a row a sample, in the stored types."""
    rows = block.rows
    columns = {"samples": pa.array(block.samples), "tokens": _column(rows.tokens)}
    if rows.documents is not None:
        columns["documents"] = _column(rows.documents.astype(np.int32))
    if rows.counted is not None:
        columns["counted"] = _column(rows.counted.view(np.uint8))
    return pa.table(columns)


def block_of(table: pa.Table) -> Block:
    """What `table_of` made a table of; tokens in place where they lie."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    held = {name: _matrix(column) for name, column in columns.items() if name != "samples"}
    counted = held.get("counted")
    rows = Rows(held["tokens"], held.get("documents"), None if counted is None else counted.view(np.bool_))
    return Block(columns["samples"].to_numpy().copy(), rows)  # the only part that becomes a tensor as it is


def _column(matrix: npt.NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def _matrix(column: pa.Array) -> npt.NDArray[Any]:
    flat: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=True)
    return flat.reshape(len(column), -1)
