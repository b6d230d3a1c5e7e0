"""Faults on purpose: `fault.inject` has a rank fail at a step, once in the life of a run. For drills and tests."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.config import InjectConfig
from raytrain_hpc.worker.task import Task


class Injector:
    """Strikes in the middle of a step: between the last microbatch and the sums over ranks."""

    def __init__(self, faults: Sequence[InjectConfig], rank: int, run_dir: Path, task: Task):
        self._task = task
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.rank == rank]
        self._marks = run_dir / "injected"

    def poison(self, step: int) -> None:
        """Before the passes of the step that follows `step` committed ones: a loss that is no number, if so wished."""
        if self._due(step, "nan"):
            real = self._task.loss

            def spoilt(output: Tensor, targets: Tensor) -> Tensor:
                self._task.loss = real  # type: ignore[method-assign]
                return real(output, targets) * float("nan")

            self._task.loss = spoilt  # type: ignore[method-assign]

    def strike(self, step: int) -> None:
        """After the passes of that step: what is to happen to this rank, if anything."""
        for kind, fault in _FAULTS.items():
            if self._due(step, kind):
                fault()

    def _due(self, step: int, kind: str) -> bool:
        """Whether such a fault is due; one at a time."""
        return any(
            fault.kind == kind and fault.step == step + 1 and self._first_time(number) for number, fault in self._faults
        )

    def _first_time(self, number: int) -> bool:
        """Whether no process has struck with it yet: the step is run again, by whoever then has this rank."""
        self._marks.mkdir(parents=True, exist_ok=True)
        try:
            (self._marks / str(number)).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _hang() -> None:
    while True:
        pass


def _hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1 << 20)  # a call through PyDLL keeps the interpreter's lock


def _raise() -> None:
    raise ArithmeticError("injected")


def _skip_collective() -> None:
    """The next all-reduce is left out."""
    real = dist.all_reduce

    def skip(*arguments: object, **named: object) -> None:
        dist.all_reduce = real

    dist.all_reduce = skip


_FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "gil": _hold_interpreter,
    "exception": _raise,
    "skip_collective": _skip_collective,
}
