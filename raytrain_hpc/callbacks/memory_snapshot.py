"""Snapshots of GPU memory, for https://docs.pytorch.org/memory_viz."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.torch_private import dump_memory_snapshot, has_memory_history, record_memory_history


class MemorySnapshot(Callback):
    """History of GPU allocations during some steps, in run.dir/memory/rank-RRRRR-step-SSSSSSSS.pickle.

    Recorded from before step `steps[0]` (0-based) until step `steps[1]` is committed, and written early if the
    generation ends with an error, such as an out-of-memory error. Without a GPU it does nothing.
    """

    def __init__(self, steps: Sequence[int] = (2, 4), *, ranks: Sequence[int] = (0,), max_entries: int = 100_000):
        """`max_entries`: number of allocations and frees to keep, the newest."""
        if len(steps) != 2 or not 0 <= steps[0] < steps[1]:
            raise CallbackError(f"MemorySnapshot: steps={list(steps)}: give the first step and a later one")
        self._first, self._end = steps
        self._ranks, self._max_entries, self._is_recording = tuple(ranks), max_entries, False

    def pre_step(self) -> None:
        """Begin to record before the first step."""
        is_selected = self.context.rank in self._ranks and has_memory_history(self.context.device)
        if is_selected and not self._is_recording and self.context.step == self._first:
            record_memory_history(self.context.device, self._max_entries)
            self._is_recording = True

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Write the snapshot after the last step."""
        if self.context.step >= self._end:
            self.close()

    def close(self) -> None:
        """Write the snapshot if one is being recorded."""
        if self._is_recording:
            directory = self.context.run_dir / "memory"
            directory.mkdir(exist_ok=True)
            name = f"rank-{self.context.rank:05d}-step-{self.context.step:08d}.pickle"
            dump_memory_snapshot(self.context.device, str(directory / name))
            record_memory_history(self.context.device, None)
            self._is_recording = False
