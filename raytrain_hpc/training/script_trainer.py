"""Runs a user's own script as a rank of a generation: its loop is the loop, its optimizer the optimizer.

Every generation runs the script from its beginning. Where it attaches its model and optimizer, they are given the state
to go on from; where it asks for steps, it gets those that are left. Between two steps their state is committed.
"""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.handshake import exchange_peer_info
from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext, init_process_groups
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.errors import ModelError, RunFailedError
from raytrain_hpc.parallel.ddp import DDPSync
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.fault_injection import FaultInjector
from raytrain_hpc.runtime.script_context import CURRENT_RANK
from raytrain_hpc.runtime.worker_spec import Script, WorkerSpec
from raytrain_hpc.snapshot.memory_store import SnapshotStore
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.script_state import ScriptState
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.state_loader import restore_state
from raytrain_hpc.training.step_metrics import get_peak_memory_gib
from raytrain_hpc.training.timers import StepTimer
from raytrain_hpc.training.trainer import TrainOutcome


def derive_step_seed(seed: int, step: int) -> int:
    """Of torch's random numbers in a step: the same on all ranks, which then draw the same batch."""
    return seed * 1_000_003 + step


class _ScriptExit(BaseException):
    """Raised in the script where it is to end here; nobody's `except Exception` holds it."""


class _ScriptLoss:
    """The script's own, where faults on purpose take hold of it."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return output


class ScriptTrainer:
    """One rank: what `attach` gives a script is this."""

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        device: torch.device,
        rendezvous: Rendezvous | None,
        control: ControlChannel,
        snapshot_store: SnapshotStore | None,
    ):
        self.device = device
        self._spec, self._config, self._control, self._snapshot_store = spec, spec.config, control, snapshot_store
        self.context: ParallelContext = init_process_groups(
            rendezvous, rank, spec.layout, device, tied_weights=False, balance_experts=False
        )
        self._emit = control.emit
        self._script_loss, self._grad_norm, self._row_counts = _ScriptLoss(), 0.0, [(1, 1)]
        self._outcome: TrainOutcome | None = None
        self._step: int | None = None
        self._totals: list[float] | None = None
        self._error: Exception | None = None
        self._is_attached = self._has_started = False
        self._step_timer = StepTimer()
        control.emit({"type": "ready", "rank": rank, "build_began": time.time(), "groups": time.time()})

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.context.rank == 0

    def run(self, start_step: int, end_step: int) -> TrainOutcome:
        """Run the script. Raises what it raises, and RunFailed where it ends without having trained."""
        script = self._spec.custom
        if not isinstance(script, Script):
            raise TypeError("a script trainer runs a script")
        token, before = CURRENT_RANK.set(self), (sys.argv, sys.path)
        sys.argv, sys.path = [script.path, *script.arguments], [str(Path(script.path).parent), *sys.path]
        try:
            runpy.run_path(script.path, run_name="__main__")
        except _ScriptExit:
            if self._error is not None:
                raise self._error from None
        except SystemExit as left:  # to Ray it would be an actor that wishes to end
            if left.code not in (None, 0):
                raise RunFailedError(f"{script.path} ended with exit code {left.code}") from left
        finally:
            sys.argv, sys.path = before
            CURRENT_RANK.reset(token)
        if self._outcome is None:
            raise RunFailedError(
                f"{script.path} ended at step {self._step} without going through the steps of attach(...)"
            )
        self._control.set_phase("saving")
        self._checkpointer.finish()
        return self._outcome

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Take charge of their state: fill it with what is to be gone on from. Raises ModelError for a second call."""
        if self._is_attached:
            raise ModelError("attach: called twice; one model and one optimizer are kept")
        self._is_attached = True
        spec, config, place = self._spec, self._config, self.context
        model.to(self.device)
        self._script_state = owned = ScriptState(model, optimizer, scheduler)
        self._buffers = list(model.buffers())
        if place.world_group is not None:
            for tensor in owned.model_tensors():
                dist.broadcast(tensor, 0)  # a script need not be deterministic
        holding = owned.to_sharded_state()
        offered = ShardedState()
        if self._snapshot_store is not None and spec.memory_step is not None:
            offered = self._snapshot_store.get_state(spec.memory_step)
        told = exchange_peer_info(holding.to_index(), offered.to_index(), place)
        store = CheckpointStore(Path(config.run.dir) / "checkpoints")
        restore_state(spec, place, holding, offered, told, store)
        if spec.start_step:
            owned.restore()
        self._state, self._replica_check = holding, ReplicaCheck(holding, place)
        self._replica_check.compare()
        lends = not self._buffers
        self._snapshots = SnapshotManager(config, self._snapshot_store, holding, lends, None, lambda: None)
        self._snapshots.begin_generation(spec.start_step, spec.generation)
        self._checkpointer = Checkpointer(
            holding, told.destination_indexes, place, store, spec.generation, config.checkpoint, self._control.emit
        )
        self._fault_injector = FaultInjector(
            config.fault.inject, place.rank, place.layout.world_size, Path(config.run.dir), self._script_loss
        )
        self._gradient_sync = None
        if place.replica_group is not None:
            self._gradient_sync = DDPSync(owned.parameters, place.replica_group, config.parallel.bucket_mib)
        optimizer.register_step_pre_hook(lambda *of_step: self._snapshots.before_update())
        self._control.arm_abort(CollectiveAbort(told.peer_sockets))
        self._control.emit({"type": "ready", "rank": place.rank, "model": time.time()})
        if spec.has_pending_checkpoint:
            self._checkpointer.save(spec.start_step)

    def steps(self, count: int | None) -> Iterator[int]:
        """As `script.ScriptRun.steps`."""
        spec = self._spec
        if not self._is_attached:
            raise ModelError("steps: attach a model and an optimizer first")
        if count is not None and count != spec.config.train.steps:
            raise ModelError(f"steps({count}): the run has train.steps={spec.config.train.steps}; make them the same")
        if self._has_started:
            raise ModelError("steps: asked for twice; a run has one loop")
        self._has_started, self._step_timer = True, StepTimer()
        for step in range(spec.start_step, spec.end_step):
            self._step, self._totals, self._row_counts = step, None, []
            self._control.set_phase("evaluating")  # whatever the script does now may take its time
            torch.manual_seed(derive_step_seed(self._config.run.seed, step))
            yield step
            if self._totals is None:
                raise ModelError(f"step {step}: backward was not called; use run.backward(loss) for loss.backward()")
            stopped, paused = self._commit(step + 1)
            if stopped or paused:
                self._outcome = "stopped" if stopped else "paused"
                raise _ScriptExit
        self._step, self._outcome = None, "done"
        self._control.set_phase("idle")  # nobody waits for what it does behind its last step

    def get_local_rows(self, num_rows: int) -> range:
        """Which of so many rows of a batch are this rank's. ModelError where there is none for somebody."""
        ranks, mine = self.context.layout.dp_size, self.context.layout.get_dp_rank(self.context.rank)
        if num_rows < ranks:
            raise ModelError(f"share: a batch of {num_rows} rows for {ranks} ranks; every rank needs one")
        share = range(mine * num_rows // ranks, (mine + 1) * num_rows // ranks)
        self._row_counts.append((len(share), num_rows))
        return share

    def backward(self, loss: Tensor) -> Tensor:
        """As `script.ScriptRun.backward`. What breaks in it leaves the script: it is the run's to go on from."""
        weight = self._get_loss_weight()
        try:
            return self._backward(loss, weight)
        except Exception as error:
            self._error = error
            raise _ScriptExit from error

    def _get_loss_weight(self) -> float:
        """What this rank's mean counts in that of all rows. ModelError where that cannot be known."""
        if self._step is None:
            raise ModelError("backward: outside of the steps that run.steps() gives")
        if self._totals is not None:
            raise ModelError(f"step {self._step}: backward was called twice; add the losses up, and call it once")
        if self.context.layout.world_size == 1:
            return 1.0
        if not self._row_counts:
            raise ModelError(
                f"step {self._step}: every rank has the whole batch; take this rank's rows with run.local_batch(batch)"
            )
        weights = {mine / rows for mine, rows in self._row_counts}
        if len(weights) > 1:
            raise ModelError(f"step {self._step}: several batches were shared before backward; share one a step")
        return weights.pop()

    def _backward(self, loss: Tensor, weight: float) -> Tensor:
        step = self._step or 0
        self._fault_injector.pre_forward(step)
        weighted = self._script_loss.loss(loss, loss) * weight
        self._snapshots.wait_for_copies()
        asked = (float(self._control.stop_requested), float(self._control.pause_requested))
        sums = torch.tensor([float(weighted.detach()), *asked], dtype=torch.float64, device=self.device)
        if self.context.world_group is not None:  # here all wait for whoever takes longest; from here on it is quick
            dist.all_reduce(sums, group=self.context.world_group)
        self._control.set_phase("training")
        before = self._stash_gradients()
        with self._sync_gradients():
            weighted.backward()  # type: ignore[no-untyped-call]
        self._fault_injector.pre_reduce(step)
        if self.context.world_group is not None:
            for buffer in self._buffers:  # running statistics: after a step all have those of the first
                dist.broadcast(buffer, 0)
        self._restore_gradients(before)
        self._checkpointer.wait_for_staging()
        if self._control.is_aborted:
            raise GenerationAbortedError("its collectives were aborted")
        self._grad_norm = float(torch.nn.utils.get_total_norm([g for g in self._gradients() if g is not None]))
        self._control.set_phase("evaluating")
        self._totals = sums.tolist()
        if not isfinite(self._totals[0]):
            raise RunFailedError(
                f"step {step + 1}: the loss is {self._totals[0]}; a loop of one's own is not run again"
            )
        return sums[0].to(loss.dtype)

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._script_state.parameters.values()]

    def _stash_gradients(self) -> list[Tensor | None]:
        """Gradients that are there already, of steps without the optimizer's: summed over ranks, they are complete."""
        before = [None if gradient is None else gradient.clone() for gradient in self._gradients()]
        for parameter in self._script_state.parameters.values():
            parameter.grad = None
        return before

    def _restore_gradients(self, stashed: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._script_state.parameters.values(), stashed, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @contextmanager
    def _sync_gradients(self) -> Iterator[None]:
        """Gradients are those of all ranks when it is left."""
        if self._gradient_sync is None:
            yield
            return
        with self._gradient_sync.backward_context(0, 0, is_last=True):
            yield
        self._gradient_sync.finish_grad_sync()

    def _commit(self, step: int) -> tuple[bool, bool]:
        """The script is through with a step: (whether it is the last because of a stop, because of a pause)."""
        loss, stop, pause = self._totals or [0.0] * 3
        before_end = step < self._spec.end_step
        stopped, paused = stop > 0 and before_end, pause > 0 and before_end
        self._fault_injector.post_step(step, self._state)
        self._script_state.capture()
        saving = self._checkpointer.should_save(step) or not before_end or stopped
        self._snapshots.after_step(step, is_last=paused)
        record = self._build_metrics(step, loss, self._step_timer.end_step())
        self._control.record_commit(record)
        every = self._config.fault.compare_every
        if every and (saving or step % every == 0):
            self._replica_check.compare()
            self._snapshots.mark_verified(step)
        if saving:
            self._control.set_phase("saving")
            with self._step_timer.exclude():
                record["time/checkpoint_s"] = self._checkpointer.save(step)
        if self.context.rank == 0:
            self._emit({"type": "step", "metrics": record})
        return stopped, paused

    def _build_metrics(self, step: int, loss: float, seconds: float) -> Record:
        world, rows = self.context.layout.world_size, self._row_counts[0][1] if self._row_counts else 1
        return {
            "step": step,
            "train/loss": loss,
            "train/lr": self._script_state.lr,
            "train/grad_norm": self._grad_norm,
            "train/tokens": step * rows,
            "throughput/tokens_per_sec": rows / seconds,
            "throughput/tokens_per_sec_per_device": rows / seconds / world,
            "time/unix": time.time(),
            "time/step_s": seconds,
            "time/data_s": 0.0,
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": get_peak_memory_gib(self.device),
            "elastic/world_size": world,
            "elastic/generation": self._spec.generation,
        }
