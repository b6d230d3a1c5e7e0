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
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.checkpoint.snapshot import Snapshots
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.errors import ModelError, RunFailed
from raytrain_hpc.parallel.replicate import Replicated
from raytrain_hpc.state.holding import Holding
from raytrain_hpc.worker.abort import Abort
from raytrain_hpc.worker.control import Control, Record
from raytrain_hpc.worker.groups import GenerationFallen, Place, join
from raytrain_hpc.worker.injection import Injector
from raytrain_hpc.worker.keeping import Keeper
from raytrain_hpc.worker.loop import Outcome
from raytrain_hpc.worker.meeting import Rendezvous
from raytrain_hpc.worker.owned import Owned
from raytrain_hpc.worker.replicas import Replicas
from raytrain_hpc.worker.restoring import restore
from raytrain_hpc.worker.saving import Saver
from raytrain_hpc.worker.spec import Script, WorkerSpec
from raytrain_hpc.worker.telling import tell


def step_seed(seed: int, step: int) -> int:
    """Of torch's random numbers in a step: the same on all ranks, which then draw the same batch."""
    return seed * 1_000_003 + step


CURRENT: ContextVar[ScriptTrainer | None] = ContextVar("script", default=None)
"""The rank whose script this thread runs; None where nobody's is."""


class _Left(BaseException):
    """Raised in the script where this generation ends before its steps do; nobody's `except Exception` holds it."""


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
        self._loss, self._rows = _GivenLoss(), (1, 1)
        self._outcome: Outcome | None = None
        self._step: int | None = None
        self._sums: list[float] | None = None
        self._attached = False
        control.emit({"type": "ready", "rank": rank, "build_began": time.time(), "groups": time.time()})

    def run(self, first: int, steps_to: int) -> Outcome:
        """Run the script. Raises what it raises, and RunFailed where it ends without having trained."""
        script = self._spec.custom
        if not isinstance(script, Script):
            raise TypeError("a script trainer runs a script")
        token, before = CURRENT.set(self), (sys.argv, sys.path)
        sys.argv, sys.path = [script.path, *script.arguments], [str(Path(script.path).parent), *sys.path]
        try:
            runpy.run_path(script.path, run_name="__main__")
        except _Left:
            pass
        finally:
            sys.argv, sys.path = before
            CURRENT.reset(token)
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
        lends = not any(True for _ in model.buffers())
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

    def steps(self, count: int | None) -> Iterator[int]:
        """As `own_loop.Attached.steps`."""
        spec = self._spec
        if not self._attached:
            raise ModelError("steps: attach a model and an optimizer first")
        if count is not None and count != spec.config.train.steps:
            raise ModelError(f"steps({count}): the run has train.steps={spec.config.train.steps}; make them the same")
        stopped = paused = False
        for step in range(spec.first, spec.steps_to):
            self._step, self._sums, began = step, None, time.perf_counter()
            self._control.mark("training")
            torch.manual_seed(step_seed(self._config.run.seed, step))
            yield step
            if self._sums is None:
                raise ModelError(f"step {step}: backward was not called; use run.backward(loss) for loss.backward()")
            stopped, paused = self._commit(step + 1, time.perf_counter() - began)
            if stopped or paused:
                self._outcome = "stopped" if stopped else "paused"
                raise _Left
        self._outcome = "done"

    def share(self, rows: int) -> range:
        """Which of so many rows of a batch are this rank's. ModelError where there is none for somebody."""
        ranks, mine = self.place.layout.data_parallel, self.place.layout.data_rank(self.place.rank)
        if rows < ranks:
            raise ModelError(f"share: a batch of {rows} rows for {ranks} ranks; every rank needs one")
        share = range(mine * rows // ranks, (mine + 1) * rows // ranks)
        self._rows = len(share), rows
        return share

    def backward(self, loss: Tensor) -> Tensor:
        """As `own_loop.Attached.backward`."""
        if self._step is None:
            raise ModelError("backward: outside of the steps that run.steps() gives")
        share, rows = self._rows
        self._injector.poison(self._step)
        weighted = self._loss.loss(loss, loss) * (share / rows)
        with self._summed():
            weighted.backward()  # type: ignore[no-untyped-call]
        self._injector.strike(self._step)
        self._keeper.wait_for_copies()
        self._saver.copied()
        asked = (float(self._control.stop_requested), float(self._control.pause_requested))
        sums = torch.tensor([float(weighted.detach()), *asked], dtype=torch.float64, device=self.device)
        if self.place.world_group is not None:
            dist.all_reduce(sums, group=self.place.world_group)
        if self._control.aborted:
            raise GenerationFallen("its collectives were aborted")
        self._sums = sums.tolist()
        if self._sums[0] != self._sums[0] or abs(self._sums[0]) == float("inf"):
            raise RunFailed(f"step {self._step + 1}: the loss is {self._sums[0]}; a loop of one's own is not run again")
        return sums[0].to(loss.dtype)

    @contextmanager
    def _summed(self) -> Iterator[None]:
        """Gradients are those of all ranks when it is left."""
        if self._replicated is None:
            yield
            return
        with self._replicated.backward(0, 0, last=True):
            yield
        self._replicated.finish()

    def _commit(self, step: int, seconds: float) -> tuple[bool, bool]:
        """The script is through with a step: (whether it is the last because of a stop, because of a pause)."""
        loss, stop, pause = self._sums or [0.0] * 3
        before_end = step < self._spec.steps_to
        stopped, paused = stop > 0 and before_end, pause > 0 and before_end
        self._injector.flip(step, self._holding)
        self._owned.changed()
        saving = self._saver.due(step) or not before_end or stopped
        self._keeper.stepped(step, last=paused)
        record = self._record(step, loss, seconds)
        self._control.committed(record)
        every = self._config.fault.compare_every
        if every and (saving or step % every == 0):
            self._replicas.compare()
            self._keeper.agreed(step)
        if saving:
            self._control.mark("saving")
            record["time/checkpoint_s"] = self._saver.save(step)
        if self.place.rank == 0:
            self._emit({"type": "step", "metrics": record})
        return stopped, paused

    def _record(self, step: int, loss: float, seconds: float) -> Record:
        world, rows = self.place.layout.world, self._rows[1]
        return {
            "step": step,
            "train/loss": loss,
            "train/lr": self._owned.rate,
            "train/grad_norm": 0.0,
            "train/tokens": step * rows,
            "throughput/tokens_per_sec": rows / seconds,
            "throughput/tokens_per_sec_per_device": rows / seconds / world,
            "time/unix": time.time(),
            "time/step_s": seconds,
            "time/data_s": 0.0,
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": 0.0,
            "elastic/world_size": world,
            "elastic/generation": self._spec.generation,
        }
