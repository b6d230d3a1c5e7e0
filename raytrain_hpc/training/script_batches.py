"""Division of a script's global batches among ranks: rows, microbatches, and the weights of their losses."""

from __future__ import annotations

from dataclasses import dataclass

from raytrain_hpc.errors import ModelError
from raytrain_hpc.planner.layout import Batching, Layout


@dataclass(frozen=True)
class MicrobatchRows:
    """A microbatch of a rank. `rows`: of the rank's rows. `weight`: of its mean loss in that of the global batch.

    `index`: its position among the `count` microbatches of all ranks; None for padding, which repeats a microbatch with
    weight zero so that every rank runs the same number of passes.
    """

    rows: slice
    weight: float
    index: int | None
    count: int


class ScriptBatches:
    """Rows of the global batches of a step that a rank computes.

    With `is_elastic`, a batch has `batching.count` microbatches of `batching.size` rows, on any number of ranks.
    """

    def __init__(self, layout: Layout, rank: int, batching: Batching, *, is_elastic: bool):
        self._dp_size, self._dp_rank = layout.dp_size, layout.get_dp_rank(rank)
        self._batching, self._is_elastic = batching, is_elastic
        self._row_counts: list[tuple[int, int]] = []  # (rows of this rank, rows of the batch) since the last pass
        self._has_used_rows = False
        self._num_taken = 0  # rows of all global batches of the step

    def begin_step(self) -> None:
        """Forget the batches of the last step, but not those that no pass has used: they were drawn ahead."""
        if self._has_used_rows:
            self._row_counts, self._has_used_rows = [], False
        self._num_taken = sum(num_rows for _, num_rows in self._row_counts)

    @property
    def num_rows(self) -> int:
        """Rows of all global batches of the step, without those that no pass has used."""
        unused = [] if self._has_used_rows else self._row_counts
        return self._num_taken - sum(num_rows for _, num_rows in unused)

    def take_rows(self, num_rows: int) -> range:
        """Return the rows of a batch that this rank computes. Raises ModelError if it cannot be divided."""
        rows = self._divide(num_rows)[self._dp_rank]
        if self._has_used_rows:  # the rows of another backward pass
            self._row_counts, self._has_used_rows = [], False
        self._row_counts.append((len(rows), num_rows))
        self._num_taken += num_rows
        return rows

    def use_rows(self, step: int) -> float:
        """Return the weight of the mean loss over this rank's rows in that of all rows. Raises ModelError if unknown.

        Call before a backward pass.
        """
        if self._dp_size == 1 and not self._row_counts:
            return 1.0
        if not self._row_counts:
            raise ModelError(
                f"step {step}: every rank has the whole batch; take this rank's rows with run.local_batch(batch) "
                "or run.loader(dataloader)"
            )
        weights = {num_local_rows / num_rows for num_local_rows, num_rows in self._row_counts}
        if len(weights) > 1:
            raise ModelError(
                f"step {step}: local_batch was called with batches of different sizes before one backward pass"
            )
        self._row_counts = self._row_counts[-1:]  # further backward passes of these rows have the same weight
        self._has_used_rows = True
        return weights.pop()

    def split_rows(self, num_local_rows: int, step: int) -> list[MicrobatchRows]:
        """Return the microbatches of this rank's rows, equally many on all ranks. Raises ModelError for other rows."""
        fitting = [(rows, total) for rows, total in self._row_counts if rows == num_local_rows]
        if self._row_counts and not fitting:
            raise ModelError(
                f"microbatches: {num_local_rows} rows, but this rank has {self._row_counts[-1][0]}; pass what "
                "run.local_batch or run.loader has returned"
            )
        self._row_counts = fitting
        self.use_rows(step)
        num_rows = fitting[-1][1] if fitting else num_local_rows
        size = self._batching.size
        counts = [-(-len(rows) // size) for rows in self._divide(num_rows)]  # microbatches of each rank
        first, total = sum(counts[: self._dp_rank]), sum(counts)
        microbatches = []
        for number in range(max(counts)):
            start = min(number, counts[self._dp_rank] - 1) * size
            rows = slice(start, min(start + size, num_local_rows))
            is_padding = number >= counts[self._dp_rank]
            weight = 0.0 if is_padding else (rows.stop - rows.start) / num_rows
            microbatches.append(MicrobatchRows(rows, weight, None if is_padding else first + number, total))
        return microbatches

    def _divide(self, num_rows: int) -> list[range]:
        """Return the rows of each rank. Raises ModelError if some rank would have none."""
        count, size = self._batching.count, self._batching.size
        if self._is_elastic:
            if num_rows != count * size:
                raise ModelError(
                    f"a batch of {num_rows} rows, but train.global_batch_size={count * size}; "
                    "train.deterministic=elastic divides the rows of every batch alike: make them the same"
                )
            by_rank = self._batching.split_by_rank(self._dp_size)
            return [range(microbatches.start * size, microbatches.stop * size) for microbatches in by_rank]
        if num_rows < self._dp_size:
            raise ModelError(f"local_batch: a batch of {num_rows} rows for {self._dp_size} ranks; every rank needs one")
        bounds = [rank * num_rows // self._dp_size for rank in range(self._dp_size + 1)]
        return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
