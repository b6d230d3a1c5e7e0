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
from raytrain_hpc.distributed.abort import Abort
from raytrain_hpc.distributed.handshake import tell
from raytrain_hpc.distributed.process_groups import GenerationFallen, Place, join
from raytrain_hpc.distributed.rendezvous import Rendezvous
from raytrain_hpc.distributed.replica_check import Replicas
from raytrain_hpc.errors import ModelError, RunFailed
from raytrain_hpc.parallel.ddp import Replicated
from raytrain_hpc.runtime.control_channel import Control, Record
from raytrain_hpc.runtime.fault_injection import Injector
from raytrain_hpc.runtime.script_context import CURRENT_RANK
from raytrain_hpc.runtime.worker_spec import Script, WorkerSpec
from raytrain_hpc.snapshot.memory_store import Snapshots
from raytrain_hpc.state.sharded_state import Holding
from raytrain_hpc.training.checkpointer import Saver
from raytrain_hpc.training.script_state import Owned
from raytrain_hpc.training.snapshot_manager import Keeper
from raytrain_hpc.training.state_loader import restore
from raytrain_hpc.training.timers import Laps
from raytrain_hpc.training.trainer import Outcome, peak_gib


def step_seed(seed: int, step: int) -> int:
    """Of torch's random numbers in a step: the same on all ranks, which then draw the same batch."""
    return seed * 1_000_003 + step


class _Left(BaseException):
    """Raised in the script where it is to end here; nobody's `except Exception` holds it."""


class _GivenLoss:
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
        meeting: Rendezvous | None,
        control: Control,
        memory: Snapshots | None,
    ):
        self.device = device
        self._spec, self._config, self._control, self._memory = spec, spec.config, control, memory
        self.place: Place = join(meeting, rank, spec.layout, device, tied=False, balanced=False)
        self._emit = control.emit
        self._loss, self._norm, self._rows = _GivenLoss(), 0.0, [(1, 1)]
        self._outcome: Outcome | None = None
        self._step: int | None = None
        self._sums: list[float] | None = None
        self._broken: Exception | None = None
        self._attached = self._stepping = False
        self._laps = Laps()
        control.emit({"type": "ready", "rank": rank, "build_began": time.time(), "groups": time.time()})

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.place.rank == 0

    def run(self, first: int, steps_to: int) -> Outcome:
        """Run the script. Raises what it raises, and RunFailed where it ends without having trained."""
        script = self._spec.custom
        if not isinstance(script, Script):
            raise TypeError("a script trainer runs a script")
        token, before = CURRENT_RANK.set(self), (sys.argv, sys.path)
        sys.argv, sys.path = [script.path, *script.arguments], [str(Path(script.path).parent), *sys.path]
        try:
            runpy.run_path(script.path, run_name="__main__")
        except _Left:
            if self._broken is not None:
                raise self._broken from None
        except SystemExit as left:  # to Ray it would be an actor that wishes to end
            if left.code not in (None, 0):
                raise RunFailed(f"{script.path} ended with exit code {left.code}") from left
        finally:
            sys.argv, sys.path = before
            CURRENT_RANK.reset(token)
        if self._outcome is None:
            raise RunFailed(f"{script.path} ended at step {self._step} without going through the steps of attach(...)")
        self._control.mark("saving")
        self._saver.finish()
        return self._outcome

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        """Take charge of their state: fill it with what is to be gone on from. Raises ModelError for a second call."""
        if self._attached:
            raise ModelError("attach: called twice; one model and one optimizer are kept")
        self._attached = True
        spec, config, place = self._spec, self._config, self.place
        model.to(self.device)
        self._owned = owned = Owned(model, optimizer, scheduler)
        self._buffers = list(model.buffers())
        if place.world_group is not None:
            for tensor in owned.of_model():
                dist.broadcast(tensor, 0)  # a script need not be deterministic
        holding = owned.holding()
        offered = Holding()
        if self._memory is not None and spec.memory_step is not None:
            offered = self._memory.at(spec.memory_step)
        told = tell(holding.index(), offered.index(), place)
        store = CheckpointStore(Path(config.run.dir) / "checkpoints")
        restore(spec, place, holding, offered, told, store)
        if spec.first:
            owned.loaded()
        self._holding, self._replicas = holding, Replicas(holding, place)
        self._replicas.compare()
        lends = not self._buffers
        self._keeper = Keeper(config, self._memory, holding, lends, None, lambda: None)
        self._keeper.begin(spec.first, spec.generation)
        self._saver = Saver(
            holding, told.holdings, place, store, spec.generation, config.checkpoint, self._control.emit
        )
        self._injector = Injector(config.fault.inject, place.rank, place.layout.world, Path(config.run.dir), self._loss)
        self._replicated = None
        if place.copies_group is not None:
            self._replicated = Replicated(owned.parameters, place.copies_group, config.parallel.bucket_mib)
        optimizer.register_step_pre_hook(lambda *of_step: self._keeper.steps())
        self._control.arm(Abort(told.sockets))
        self._control.emit({"type": "ready", "rank": place.rank, "model": time.time()})
        if spec.unsaved:
            self._saver.save(spec.first)

    def steps(self, count: int | None) -> Iterator[int]:
        """As `script.ScriptRun.steps`."""
        spec = self._spec
        if not self._attached:
            raise ModelError("steps: attach a model and an optimizer first")
        if count is not None and count != spec.config.train.steps:
            raise ModelError(f"steps({count}): the run has train.steps={spec.config.train.steps}; make them the same")
        if self._stepping:
            raise ModelError("steps: asked for twice; a run has one loop")
        self._stepping, self._laps = True, Laps()
        for step in range(spec.first, spec.steps_to):
            self._step, self._sums, self._rows = step, None, []
            self._control.mark("evaluating")  # whatever the script does now may take its time
            torch.manual_seed(step_seed(self._config.run.seed, step))
            yield step
            if self._sums is None:
                raise ModelError(f"step {step}: backward was not called; use run.backward(loss) for loss.backward()")
            stopped, paused = self._commit(step + 1)
            if stopped or paused:
                self._outcome = "stopped" if stopped else "paused"
                raise _Left
        self._step, self._outcome = None, "done"
        self._control.mark("idle")  # nobody waits for what it does behind its last step

    def share(self, rows: int) -> range:
        """Which of so many rows of a batch are this rank's. ModelError where there is none for somebody."""
        ranks, mine = self.place.layout.data_parallel, self.place.layout.data_rank(self.place.rank)
        if rows < ranks:
            raise ModelError(f"share: a batch of {rows} rows for {ranks} ranks; every rank needs one")
        share = range(mine * rows // ranks, (mine + 1) * rows // ranks)
        self._rows.append((len(share), rows))
        return share

    def backward(self, loss: Tensor) -> Tensor:
        """As `script.ScriptRun.backward`. What breaks in it leaves the script: it is the run's to go on from."""
        weight = self._weight()
        try:
            return self._backward(loss, weight)
        except Exception as error:
            self._broken = error
            raise _Left from error

    def _weight(self) -> float:
        """What this rank's mean counts in that of all rows. ModelError where that cannot be known."""
        if self._step is None:
            raise ModelError("backward: outside of the steps that run.steps() gives")
        if self._sums is not None:
            raise ModelError(f"step {self._step}: backward was called twice; add the losses up, and call it once")
        if self.place.layout.world == 1:
            return 1.0
        if not self._rows:
            raise ModelError(f"step {self._step}: every rank has the whole batch; cut it with run.share(batch)")
        weights = {mine / rows for mine, rows in self._rows}
        if len(weights) > 1:
            raise ModelError(f"step {self._step}: several batches were shared before backward; share one a step")
        return weights.pop()

    def _backward(self, loss: Tensor, weight: float) -> Tensor:
        step = self._step or 0
        self._injector.poison(step)
        weighted = self._loss.loss(loss, loss) * weight
        self._keeper.wait_for_copies()
        asked = (float(self._control.stop_requested), float(self._control.pause_requested))
        sums = torch.tensor([float(weighted.detach()), *asked], dtype=torch.float64, device=self.device)
        if self.place.world_group is not None:  # here all wait for whoever takes longest; from here on it is quick
            dist.all_reduce(sums, group=self.place.world_group)
        self._control.mark("training")
        before = self._set_aside()
        with self._summed():
            weighted.backward()  # type: ignore[no-untyped-call]
        self._injector.strike(step)
        if self.place.world_group is not None:
            for buffer in self._buffers:  # running statistics: after a step all have those of the first
                dist.broadcast(buffer, 0)
        self._add_back(before)
        self._saver.copied()
        if self._control.aborted:
            raise GenerationFallen("its collectives were aborted")
        self._norm = float(torch.nn.utils.get_total_norm([g for g in self._gradients() if g is not None]))
        self._control.mark("evaluating")
        self._sums = sums.tolist()
        if not isfinite(self._sums[0]):
            raise RunFailed(f"step {step + 1}: the loss is {self._sums[0]}; a loop of one's own is not run again")
        return sums[0].to(loss.dtype)

    def _gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._owned.parameters.values()]

    def _set_aside(self) -> list[Tensor | None]:
        """Gradients that are there already, of steps without the optimizer's: summed over ranks, they are complete."""
        before = [None if gradient is None else gradient.clone() for gradient in self._gradients()]
        for parameter in self._owned.parameters.values():
            parameter.grad = None
        return before

    def _add_back(self, before: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._owned.parameters.values(), before, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    @contextmanager
    def _summed(self) -> Iterator[None]:
        """Gradients are those of all ranks when it is left."""
        if self._replicated is None:
            yield
            return
        with self._replicated.backward(0, 0, last=True):
            yield
        self._replicated.finish()

    def _commit(self, step: int) -> tuple[bool, bool]:
        """The script is through with a step: (whether it is the last because of a stop, because of a pause)."""
        loss, stop, pause = self._sums or [0.0] * 3
        before_end = step < self._spec.steps_to
        stopped, paused = stop > 0 and before_end, pause > 0 and before_end
        self._injector.flip(step, self._holding)
        self._owned.changed()
        saving = self._saver.due(step) or not before_end or stopped
        self._keeper.stepped(step, last=paused)
        record = self._record(step, loss, self._laps.end())
        self._control.committed(record)
        every = self._config.fault.compare_every
        if every and (saving or step % every == 0):
            self._replicas.compare()
            self._keeper.agreed(step)
        if saving:
            self._control.mark("saving")
            with self._laps.left_out():
                record["time/checkpoint_s"] = self._saver.save(step)
        if self.place.rank == 0:
            self._emit({"type": "step", "metrics": record})
        return stopped, paused

    def _record(self, step: int, loss: float, seconds: float) -> Record:
        world, rows = self.place.layout.world, self._rows[0][1] if self._rows else 1
        return {
            "step": step,
            "train/loss": loss,
            "train/lr": self._owned.rate,
            "train/grad_norm": self._norm,
            "train/tokens": step * rows,
            "throughput/tokens_per_sec": rows / seconds,
            "throughput/tokens_per_sec_per_device": rows / seconds / world,
            "time/unix": time.time(),
            "time/step_s": seconds,
            "time/data_s": 0.0,
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": peak_gib(self.device),
            "elastic/world_size": world,
            "elastic/generation": self._spec.generation,
        }
