"""Fault injection for drills and tests: `fault.inject` makes a rank fail at a step, once per run."""

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

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.config.schema import InjectConfig
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.storage.location import Location, create_file
from raytrain_hpc.torch_device import synchronize
from raytrain_hpc.torch_private import sleep_on_device

_ENDLESS_CYCLES = 1 << 62  # of a GPU's clock: decades


class SupportsLoss(Protocol):
    """An object whose `loss` injected faults replace."""

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss of a microbatch, and the number that the sum of losses is divided by."""


class FaultInjector(Callback):
    """Injector of the faults of one rank.

    `state`: the live state, of which a bit can be flipped. `cut_network`: makes this rank receive nothing from others.
    """

    priority = 100

    def __init__(
        self,
        faults: Sequence[InjectConfig],
        rank: int,
        world_size: int,
        run_dir: Location,
        train_module: SupportsLoss,
        state: ShardedState,
        cut_network: Callable[[], None],
    ):
        self._train_module, self._rank, self._state, self._cut_network = train_module, rank, state, cut_network
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.rank % world_size == rank]
        self._marker_dir = run_dir / "injected"
        slow_markers = [self._marker_dir / str(number) for number, fault in enumerate(faults) if fault.kind == "slow"]
        if any(marker.is_file() and json.loads(marker.read_bytes())["pid"] == os.getpid() for marker in slow_markers):
            self._slow_down()  # slowness belongs to the process, which may have another rank now

    def pre_step(self) -> None:
        """Inject a NaN or a spike into the loss."""
        for kind, factor in (("nan", float("nan")), ("spike", 100.0)):
            if self._claim_fault(self.context.step, kind):
                self._corrupt_loss(factor)

    def _corrupt_loss(self, factor: float) -> None:
        """Multiply the loss of the next microbatch by a factor."""
        original_loss = self._train_module.loss

        def corrupted(output: Any, batch: Any) -> tuple[Tensor, Any]:
            self._train_module.loss = original_loss  # type: ignore[method-assign]
            loss, count = original_loss(output, batch)
            return loss * factor, count

        self._train_module.loss = corrupted  # type: ignore[method-assign]

    def post_forward_backward(self) -> None:
        """Inject a crash, hang, error or slowdown, before the all-reduce of losses."""
        for kind, fault in _FAULT_ACTIONS.items():
            if self._claim_fault(self.context.step, kind):
                fault(self.context.device)
        if self._claim_fault(self.context.step, "slow"):
            self._slow_down()
        if self._claim_fault(self.context.step, "network_down"):
            self._cut_network()

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Flip the lowest bit of the first weight."""
        if self._claim_fault(self.context.step - 1, "bitflip"):
            weight = next(shard.tensor for shard in self._state if shard.tensor.numel())
            weight.view(-1).view(torch.uint8)[0] ^= 1

    def _slow_down(self) -> None:
        original_loss, last_cpu_time = self._train_module.loss, time.thread_time()

        def slow(output: Any, batch: Any) -> tuple[Tensor, Any]:
            nonlocal last_cpu_time
            time.sleep(2 * (time.thread_time() - last_cpu_time))
            loss_and_count = original_loss(output, batch)
            last_cpu_time = time.thread_time()
            return loss_and_count

        self._train_module.loss = slow  # type: ignore[method-assign]

    def _claim_fault(self, step: int, kind: str) -> bool:
        """Return whether a fault of this kind occurs at this step, and claim one."""
        return any(
            fault.kind == kind and fault.step == step + 1 and self._claim_marker(number)
            for number, fault in self._faults
        )

    def _claim_marker(self, number: int) -> bool:
        """Create the marker of a fault. False if it exists: the step runs again after a recovery, in any process."""
        content = json.dumps({"rank": self._rank, "pid": os.getpid()}).encode()
        try:
            create_file(self._marker_dir / str(number), content)
        except FileExistsError:
            return False
        return True


def _lose_node() -> None:
    """Kill all Ray processes of this node: the children of this process's parent, the parent, and this process."""
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
    except OSError:  # the process has just ended
        return None


def _hang() -> None:
    while True:
        pass


def _hold_interpreter() -> None:
    ctypes.PyDLL(None).sleep(1 << 20)  # a call through PyDLL holds the GIL


def _crash() -> None:
    ctypes.string_at(0)


def _raise_exception() -> None:
    raise ArithmeticError("injected")


def _skip_collective() -> None:
    """Skip the next all-reduce. A single rank has none, and must not skip one of a later generation."""
    if not dist.is_initialized():
        return
    all_reduce = dist.all_reduce

    def skip(*args: object, **kwargs: object) -> None:
        dist.all_reduce = all_reduce

    dist.all_reduce = skip


def _swap_collectives() -> None:
    """Swap the next two all-reduces."""
    if not dist.is_initialized():
        return
    all_reduce = dist.all_reduce

    def defer(*first_args: Any, **first_kwargs: Any) -> None:
        def run_both(*second_args: Any, **second_kwargs: Any) -> None:
            dist.all_reduce = all_reduce
            all_reduce(*second_args, **second_kwargs)
            all_reduce(*first_args, **first_kwargs)

        dist.all_reduce = run_both

    dist.all_reduce = defer


def _resize_collective() -> None:
    """Give the first half of its tensor to the next all-reduce."""
    if not dist.is_initialized():
        return
    all_reduce = dist.all_reduce

    def halve(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        dist.all_reduce = all_reduce
        all_reduce(tensor.flatten()[: tensor.numel() // 2].clone(), *args, **kwargs)

    dist.all_reduce = halve


def _exhaust_memory(device: torch.device) -> None:
    torch.empty(1 << 60, dtype=torch.uint8, device=device)


def _hang_device(device: torch.device) -> None:
    sleep_on_device(_ENDLESS_CYCLES)
    synchronize(device)


def _access_invalid_memory(device: torch.device) -> None:
    """Make a kernel fail, after which every call to the device fails in this process."""
    torch.zeros(1, device=device)[torch.tensor([1 << 40], device=device)].sum().item()


_FAULT_ACTIONS: dict[str, Callable[[torch.device], None]] = {
    "kill": lambda device: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda device: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda device: _hang(),
    "gil": lambda device: _hold_interpreter(),
    "exception": lambda device: _raise_exception(),
    "segfault": lambda device: _crash(),
    "oom": _exhaust_memory,
    "skip_collective": lambda device: _skip_collective(),
    "swap_collectives": lambda device: _swap_collectives(),
    "resize_collective": lambda device: _resize_collective(),
    "gpu_hang": _hang_device,
    "gpu_error": _access_invalid_memory,
    "node": lambda device: _lose_node(),
}
