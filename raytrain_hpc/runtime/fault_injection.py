"""Faults on purpose: `fault.inject` has a rank fail at a step, once in the life of a run. For drills and tests."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.config.schema import InjectConfig
from raytrain_hpc.state.sharded_state import ShardedState


class SupportsLoss(Protocol):
    """What faults on purpose take hold of."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The loss of a microbatch."""


class FaultInjector:
    """Strikes in the middle of a step: between the last microbatch and the sums over ranks."""

    def __init__(
        self, faults: Sequence[InjectConfig], rank: int, world_size: int, run_dir: Path, train_module: SupportsLoss
    ):
        self._train_module, self._rank = train_module, rank
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.rank % world_size == rank]
        self._marker_dir = run_dir / "injected"
        slow = [self._marker_dir / str(number) for number, fault in enumerate(faults) if fault.kind == "slow"]
        if any(mark.exists() and json.loads(mark.read_text())["pid"] == os.getpid() for mark in slow):
            self._slow_down()  # in this process, whichever rank it has now

    def pre_forward(self, step: int) -> None:
        """Before the passes of the step that follows `step` committed ones: a spoilt loss, if so wished."""
        for kind, factor in (("nan", float("nan")), ("spike", 100.0)):
            if self._claim_fault(step, kind):
                self._corrupt_loss(factor)

    def _corrupt_loss(self, factor: float) -> None:
        """Of the next microbatch."""
        real = self._train_module.loss

        def spoilt(output: Tensor, targets: Tensor) -> Tensor:
            self._train_module.loss = real  # type: ignore[method-assign]
            return real(output, targets) * factor

        self._train_module.loss = spoilt  # type: ignore[method-assign]

    def pre_reduce(self, step: int) -> None:
        """After the passes of that step: what is to happen to this rank, if anything."""
        for kind, fault in _FAULT_ACTIONS.items():
            if self._claim_fault(step, kind):
                fault()
        if self._claim_fault(step, "slow"):
            self._slow_down()

    def post_step(self, step: int, state: ShardedState) -> None:
        """After `step` steps are taken: the lowest bit of the first weight there is, if so wished."""
        if self._claim_fault(step - 1, "bitflip"):
            weight = next(held.tensor for held in state if held.tensor.numel())
            weight.view(-1).view(torch.uint8)[0] ^= 1

    def _slow_down(self) -> None:
        real, before = self._train_module.loss, time.thread_time()

        def slow(output: Tensor, targets: Tensor) -> Tensor:
            nonlocal before
            time.sleep(2 * (time.thread_time() - before))
            loss = real(output, targets)
            before = time.thread_time()
            return loss

        self._train_module.loss = slow  # type: ignore[method-assign]

    def _claim_fault(self, step: int, kind: str) -> bool:
        """Whether such a fault is due; one at a time."""
        return any(
            fault.kind == kind and fault.step == step + 1 and self._claim_marker(number)
            for number, fault in self._faults
        )

    def _claim_marker(self, number: int) -> bool:
        """Whether no process has struck with it yet: the step is run again, by whoever then has this rank."""
        self._marker_dir.mkdir(parents=True, exist_ok=True)
        try:
            with (self._marker_dir / str(number)).open("x") as mark:
                json.dump({"rank": self._rank, "pid": os.getpid()}, mark)
        except FileExistsError:
            return False
        return True


def _lose_node() -> None:
    """Kill all that Ray has started on this node: whose parent is this process's, the parent, and this process."""
    parent = os.getppid()
    if Path(f"/proc/{parent}/comm").read_text().strip() == "raylet":
        for entry in Path("/proc").glob("[0-9]*"):
            if _read_parent_pid(entry) == parent and int(entry.name) != os.getpid():
                os.kill(int(entry.name), signal.SIGKILL)
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _read_parent_pid(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has just ended
        return None


def _hang() -> None:
    while True:
        pass


def _hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1 << 20)  # a call through PyDLL keeps the interpreter's lock


def _raise_exception() -> None:
    raise ArithmeticError("injected")


def _skip_collective() -> None:
    """The next all-reduce is left out. A rank alone has none, and is not to leave out that of a later generation."""
    if not dist.is_initialized():
        return
    real = dist.all_reduce

    def skip(*arguments: object, **named: object) -> None:
        dist.all_reduce = real

    dist.all_reduce = skip


def _swap_collectives() -> None:
    """The next all-reduce comes after the one behind it."""
    if not dist.is_initialized():
        return
    real = dist.all_reduce

    def put_off(*first: Any, **of_first: Any) -> None:
        def both(*second: Any, **of_second: Any) -> None:
            dist.all_reduce = real
            real(*second, **of_second)
            real(*first, **of_first)

        dist.all_reduce = both

    dist.all_reduce = put_off


_FAULT_ACTIONS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": _hang,
    "gil": _hold_interpreter,
    "exception": _raise_exception,
    "skip_collective": _skip_collective,
    "swap_collectives": _swap_collectives,
    "node": _lose_node,
}
