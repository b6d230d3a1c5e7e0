"""Block stream: training data read by other processes and delivered to the ranks in blocks.

A block holds the samples of one data-parallel rank for a *group* of consecutive steps. Blocks are a few megabytes, so
that delivering one costs little compared with reading it. Tensor-, pipeline- and context-parallel peers get the same
block.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raytrain_hpc.data.loader.packing import SampleRows
from raytrain_hpc.data.loader.stream import Block, LocalStream, Microbatch, Stream
from raytrain_hpc.errors import DataError

BLOCK_BYTES = 4 << 20  # target size: smaller blocks cost more per delivery, much larger ones too much memory
_MAX_GROUP_STEPS = 64  # a worker waits for its whole first group


@dataclass(frozen=True)
class BlockPlan:
    """Division of the steps [first_step, stop_step) of a generation into groups of `group_steps`.

    `microbatches_by_dp_rank`: the microbatches of each data-parallel rank; `dp_ranks`: data-parallel rank of each rank.
    """

    first_step: int
    stop_step: int
    group_steps: int
    microbatches_by_dp_rank: tuple[range, ...]
    dp_ranks: tuple[int, ...]

    @classmethod
    def build(
        cls,
        first_step: int,
        stop_step: int,
        microbatches_by_dp_rank: tuple[range, ...],
        dp_ranks: tuple[int, ...],
        microbatch_bytes: int,
    ) -> BlockPlan:
        """Build a plan whose groups hold about BLOCK_BYTES per data-parallel rank."""
        steps = BLOCK_BYTES // (microbatch_bytes * max(len(microbatches) for microbatches in microbatches_by_dp_rank))
        return cls(first_step, stop_step, min(max(1, steps), _MAX_GROUP_STEPS), microbatches_by_dp_rank, dp_ranks)

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return -(-(self.stop_step - self.first_step) // self.group_steps)

    def get_steps(self, group: int) -> range:
        """Return the steps of a group."""
        first = self.first_step + group * self.group_steps
        return range(first, min(first + self.group_steps, self.stop_step))


class BlocksUnavailableError(Exception):
    """Blocks are no longer delivered, for the reason in the message."""


class BlockSource(Protocol):
    """Source from which a rank requests its blocks."""

    plan: BlockPlan

    def get_block(self, group: int) -> Block | None:
        """Return the rank's block of a group, or None if it is not ready yet. Raises BlocksUnavailableError."""


class BlockStream(Stream):
    """Stream of delivered blocks that reads missing blocks locally. Both give the same bytes."""

    def __init__(self, local: LocalStream, source: BlockSource, log: Callable[[str], None]):
        """Deliver from `source`, else from `local`; `log` receives a line when delivery starts and when it ends."""
        self._local, self._source, self._log = local, source, log
        self.micro_batch_size = local.micro_batch_size
        self._is_disconnected = False
        self.num_delivered = 0  # groups received as blocks

    def iter_blocks(self, steps: range, microbatches: range, max_microbatches: int) -> Generator[Block, None, None]:
        """Implement `Stream.iter_blocks` for all microbatches of the rank, from the first step of a group on."""
        plan = self._source.plan
        for start in range(steps.start, steps.stop, plan.group_steps):
            steps_in_group = range(start, min(start + plan.group_steps, steps.stop))
            block = None if self._is_disconnected else self._get_block((start - plan.first_step) // plan.group_steps)
            if block is None:
                yield from self._local.iter_blocks(steps_in_group, microbatches, max_microbatches)
                continue
            self._check_samples(block, steps_in_group, microbatches)
            if not self.num_delivered:
                self._log(f"data: readers deliver from step {steps_in_group.start + 1} on")
            self.num_delivered += 1
            yield from block.split(max_microbatches * self.micro_batch_size)

    def read_microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Implement `Stream.read_microbatch`: no block is requested, so the source serves one thread only."""
        return self._local.read_microbatch(step, microbatch)

    def _get_block(self, group: int) -> Block | None:
        try:
            return self._source.get_block(group)
        except BlocksUnavailableError as reason:
            self._is_disconnected = True
            self._log(f"data: readers lost ({reason}); every worker reads its own data from now on")
            return None

    def _check_samples(self, block: Block, steps: range, microbatches: range) -> None:
        expected = self._local.get_samples_of_steps(steps, microbatches)
        if not np.array_equal(block.samples, expected):
            delivered = f"{block.samples[:1]}..{block.samples[-1:]} ({len(block.samples)})"
            raise DataError(
                f"steps {steps.start}..{steps.stop - 1}: received a block of samples {delivered} instead of "
                f"{expected[0]}..{expected[-1]} ({len(expected)})"
            )


def block_to_table(block: Block) -> pa.Table:
    """Convert a block to an Arrow table with one row per sample, in the stored dtypes."""
    rows = block.rows
    columns = {"samples": pa.array(block.samples), "tokens": _to_arrow_column(rows.tokens)}
    if rows.document_ids is not None:
        columns["documents"] = _to_arrow_column(rows.document_ids.astype(np.int32))
    if rows.loss_mask is not None:
        columns["counted"] = _to_arrow_column(rows.loss_mask.view(np.uint8))
    return pa.table(columns)


def table_to_block(table: pa.Table) -> Block:
    """Convert the output of `block_to_table` back to a block. Tokens are not copied."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    matrices = {name: _to_matrix(column) for name, column in columns.items() if name != "samples"}
    loss_mask = matrices.get("counted")
    rows = SampleRows(
        matrices["tokens"], matrices.get("documents"), None if loss_mask is None else loss_mask.view(np.bool_)
    )
    return Block(columns["samples"].to_numpy().copy(), rows)  # becomes a tensor as is: must be writable


def _to_arrow_column(matrix: npt.NDArray[Any]) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def _to_matrix(column: pa.Array) -> npt.NDArray[Any]:
    flat: npt.NDArray[Any] = column.flatten().to_numpy(zero_copy_only=True)
    return flat.reshape(len(column), -1)
