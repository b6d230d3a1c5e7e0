"""Fault injection for drills and tests: `fault.inject` makes a rank fail at a step, once per run."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.config.schema import InjectConfig
from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.reduction_order import PartitionedSum
from raytrain_hpc.runtime.bit_flips import (
    CallBitFlip,
    ModelBitFlip,
    UpdateBitFlip,
    UpdateHook,
    flip_gradient_bit,
    flip_state_bit,
)
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.storage.location import Location, create_file
from raytrain_hpc.torch_device import synchronize
from raytrain_hpc.torch_private import sleep_on_device

_ENDLESS_CYCLES = 1 << 62  # of a GPU's clock: decades
_MODEL_BIT_FLIPS = ("bitflip_batch", "bitflip_activation", "bitflip_gradient")
_CALL_BIT_FLIPS = {"bitflip_message": (dist, "all_to_all_single"), "bitflip_sum": (PartitionedSum, "compute_total")}
_ATTACHED_BIT_FLIPS = (*_MODEL_BIT_FLIPS, *_CALL_BIT_FLIPS, "bitflip_update")


class SupportsLoss(Protocol):
    """An object whose `loss` injected faults replace."""

    def loss(self, output: Any, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss of a microbatch, and the number that the sum of losses is divided by."""


class FaultInjector(Callback):
    """Injector of the faults of one rank.

    `state`: the live state, of which a bit can be flipped. `cut_network`: makes this rank receive nothing from others.
    `tracer`: tells passes of audits. `update_hooks`: those of the optimizer; None: it is that of a
    script, whose weights are corrupted after its step.
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
        tracer: ComputationTracer,
        update_hooks: list[UpdateHook] | None,
    ):
        self._train_module, self._rank, self._state, self._cut_network = train_module, rank, state, cut_network
        self._tracer, self._update_hooks = tracer, update_hooks
        self._after_step = ("bitflip",) if update_hooks is not None else ("bitflip", "bitflip_update")
        self._before_step = [kind for kind in _ATTACHED_BIT_FLIPS if kind not in self._after_step]
        self._attached: list[CallBitFlip | UpdateBitFlip] = []  # they outlive the model
        self._faults = [(number, fault) for number, fault in enumerate(faults) if fault.rank % world_size == rank]
        self._marker_dir = run_dir / "injected"
        # Slowness and broken devices belong to the process, which may have another rank now.
        claimed = [fault for number, fault in enumerate(faults) if self._has_claimed(number)]
        if any(fault.kind == "slow" for fault in claimed):
            self._slow_down()
        self._persistent = [fault for fault in claimed if fault.persistent]
        self._unattached = [fault for fault in self._persistent if fault.kind in self._before_step]

    def pre_step(self) -> None:
        """Inject a NaN or a spike into the loss, and flip bits of the state or of what the model computes."""
        claimed = [self._claim_fault(self.context.step, kind) for kind in self._before_step]
        for fault in self._unattached + [fault for fault in claimed if fault is not None]:
            self._attach_bit_flip(fault)
        self._unattached = []
        self._flip_state_bits(self.context.step, "bitflip_weight", "model.")
        self._flip_state_bits(self.context.step, "bitflip_moment", "optimizer.")
        for kind, factor in (("nan", float("nan")), ("spike", 100.0)):
            if self._claim_fault(self.context.step, kind) is not None:
                self._corrupt_loss(factor)

    def close(self) -> None:
        """Undo what would corrupt later generations of this process."""
        for flip in self._attached:
            flip.detach()

    def _attach_bit_flip(self, fault: InjectConfig) -> None:
        if fault.kind in _MODEL_BIT_FLIPS:
            model_flip = ModelBitFlip(fault.kind, fault.bit, self._tracer, is_persistent=fault.persistent)
            model_flip.attach(self.context.modules.values())
            return
        if fault.kind == "bitflip_update" and self._update_hooks is not None:
            flip: CallBitFlip | UpdateBitFlip = UpdateBitFlip(
                self._update_hooks, fault.bit, is_persistent=fault.persistent
            )
        else:
            flip = CallBitFlip(*_CALL_BIT_FLIPS[fault.kind], fault.bit, is_persistent=fault.persistent)
        flip.attach()
        self._attached.append(flip)

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
        for kind, inject in _FAULT_ACTIONS.items():
            if self._claim_fault(self.context.step, kind) is not None:
                inject(self.context.device)
        if self._claim_fault(self.context.step, "slow") is not None:
            self._slow_down()
        if self._claim_fault(self.context.step, "network_down") is not None:
            self._cut_network()
        for fault in self._list_due_faults(self.context.step, "bitflip_reduced"):
            flip_gradient_bit(self.context.get_gradients(), fault.bit)

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Flip a bit of the first weight."""
        for kind in self._after_step:
            self._flip_state_bits(self.context.step - 1, kind, "model.")

    def _slow_down(self) -> None:
        original_loss, last_cpu_time = self._train_module.loss, time.thread_time()

        def slow(output: Any, batch: Any) -> tuple[Tensor, Any]:
            nonlocal last_cpu_time
            time.sleep(2 * (time.thread_time() - last_cpu_time))
            loss_and_count = original_loss(output, batch)
            last_cpu_time = time.thread_time()
            return loss_and_count

        self._train_module.loss = slow  # type: ignore[method-assign]

    def _flip_state_bits(self, step: int, kind: str, prefix: str) -> None:
        for fault in self._list_due_faults(step, kind):
            flip_state_bit(self._state, prefix, fault.bit)

    def _list_due_faults(self, step: int, kind: str) -> list[InjectConfig]:
        """Return the persistent faults of this kind, and one that occurs at this step, which is claimed."""
        persistent = [fault for fault in self._persistent if fault.kind == kind]
        claimed = self._claim_fault(step, kind)
        return persistent if claimed is None else [*persistent, claimed]

    def _claim_fault(self, step: int, kind: str) -> InjectConfig | None:
        """Claim a fault of this kind that occurs at this step, and return it; None if there is none."""
        for number, fault in self._faults:
            if fault.kind == kind and fault.step == step + 1 and self._claim_marker(number):
                if fault.persistent:
                    self._persistent.append(fault)
                return fault
        return None

    def _has_claimed(self, number: int) -> bool:
        """Return whether this process has injected a fault, in an earlier generation."""
        marker = self._marker_dir / str(number)
        return marker.is_file() and bool(json.loads(marker.read_bytes())["pid"] == os.getpid())

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
    # A signal to this thread: another thread can handle one to the process, a moment later.
    "stop": lambda device: signal.pthread_kill(threading.get_ident(), signal.SIGSTOP),
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
