"""The training loop: one step, readable top to bottom, and what comes between steps."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.loader.eval_set import EvaluationSet
from raytrain_hpc.distributed.process_groups import GenerationFallen, Place
from raytrain_hpc.distributed.replica_check import Replicas
from raytrain_hpc.elastic.watchdog import Phase
from raytrain_hpc.errors import RunFailed
from raytrain_hpc.observability.metrics import COMPARED
from raytrain_hpc.observability.profiler import StepProfiler
from raytrain_hpc.optim.grad_norm import GradientNorm
from raytrain_hpc.optim.lr_scheduler import evaluates, learning_rate
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.parallel.pairwise_sum import pairwise_total
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.runtime.control_channel import Control, Record
from raytrain_hpc.runtime.fault_injection import Injector
from raytrain_hpc.training.checkpointer import Saver
from raytrain_hpc.training.device_loader import Feed, on_device
from raytrain_hpc.training.expert_bias import Balance
from raytrain_hpc.training.forward_backward import Passes
from raytrain_hpc.training.snapshot_manager import Keeper
from raytrain_hpc.training.step_guard import BadSteps
from raytrain_hpc.training.timers import Laps, Stopwatch, over_ranks
from raytrain_hpc.training.train_module import Batch

Outcome = Literal["done", "stopped", "paused"]

_ASK_EVERY = 8  # evaluation passes between two looks at whether to stop


@dataclass
class StepResult:
    """What one committed step gave, the same on every rank."""

    loss: float
    grad_norm: float
    stop: bool
    pause: bool
    data_s: float
    losses: list[float]  # of the step's microbatches, one by one


@dataclass
class Trainer:
    """The parts of one rank, put together by worker.build."""

    config: Config
    place: Place
    batching: Batching
    passes: Passes
    watch: Stopwatch
    buffers: list[Tensor]  # running statistics, which depend on the data that a rank saw
    balance: Balance
    bad_steps: BadSteps
    optimizer: Optimizer
    norm: GradientNorm
    feed: Feed
    evaluation: EvaluationSet | None
    saver: Saver
    profiler: StepProfiler
    generation: int
    emit: Callable[[Record], None]
    control: Control
    keeper: Keeper
    replicas: Replicas
    injector: Injector
    held: dict[str, float]  # GiB of weights and moments here, under their metric keys
    unevaluated: Record | None = None
    unsaved: bool = False

    def __post_init__(self) -> None:
        # The first step of a generation may wait for a compiler.
        self._gradient_bytes = 0
        self._busy: Phase = "building" if self.config.train.compile else "training"

    def run(self, first: int, steps_to: int) -> Outcome:
        """Train from `first` committed steps to `steps_to` and save, unless stopped or paused before."""
        with self.feed.reading(first, steps_to), self.keeper.keeping():
            outcome = self._run(first, steps_to)
            self.control.mark("saving")
        self.saver.finish()
        return outcome

    def _run(self, first: int, steps_to: int) -> Outcome:
        step, stopped, paused = first, False, False
        if self.unsaved:
            self._save(first)
        if self.unevaluated is not None:
            stopped = not self._evaluate_into(self.unevaluated)
            if not stopped:
                self.emit({"type": "step", "metrics": self.unevaluated})
        laps = Laps()
        while step < steps_to and not (stopped or paused):
            with self.profiler.step(step):
                result = self.train_step(step)
            step += 1
            stopped, paused = result.stop and step < steps_to, result.pause and step < steps_to
            self.injector.flip(step, self.keeper.holding)
            saving = self.saver.due(step) or step == steps_to or stopped
            self.keeper.stepped(step, last=paused)
            record = self._record(step, result, laps.end())
            self.control.committed(record)
            self._compare_replicas(step, saving)
            self._compare_times(step, record)
            self._busy = "training"
            with laps.left_out():
                if saving:  # before the evaluation, which can take its time
                    record["time/checkpoint_s"] = self._save(step)
                if not (stopped or paused) and self.evaluation and evaluates(self.config.train, step, steps_to):
                    stopped = not self._evaluate_into(record)
                    if stopped and not saving:
                        record["time/checkpoint_s"] = self._save(step)
            self.control.amend(record)
            self.emit({"type": "step", "metrics": record})
        return "stopped" if stopped else "paused" if paused else "done"

    def train_step(self, step: int) -> StepResult:
        """One optimizer step over this rank's microbatches, of which nothing is applied before its numbers are seen.

        Where they are bad the step is computed once more: a bit that flipped is not there any more. Raises RunFailed
        where they still are, unless fault.on_nan goes on without such a step.
        """
        result = self._gradients(step, self.feed.batch)
        if self.bad_steps.judge(result.loss, result.grad_norm) is not None:
            result, taken = self._second_try(step, result)
            if not taken:
                return result
        self._share_buffers()
        self.keeper.steps()
        with self.watch.on("optimizer"):
            self.optimizer.step(learning_rate(self.config.train, step))
        self.balance.step()
        self.bad_steps.taken(step, result.loss)
        self._check()
        return result

    def _second_try(self, step: int, bad: StepResult) -> tuple[StepResult, bool]:
        """Compute a step again, and see to it where it is as bad. Returns what it gave, and whether that is taken."""
        incident = self.bad_steps.incident(step, (bad.loss, bad.grad_norm), bad.losses)
        self._drop_gradients()
        result = self._gradients(step, self.feed.again)
        if self.bad_steps.judge(result.loss, result.grad_norm) is None:
            self.bad_steps.report(incident, "gone when computed again", 0)
            return result, True
        self._drop_gradients()
        self.keeper.steps()
        self.control.mark("saving")
        undone = self.bad_steps.not_taken(step, result.loss, result.grad_norm)
        self.optimizer.skip()
        back = f"; went back to the state of step {step - undone}" if undone else ""
        self.bad_steps.report(incident, f"the same when computed again{back}", undone)
        return result, False

    def _gradients(self, step: int, batch_of: Callable[[int, int], Batch]) -> StepResult:
        """Leave the clipped gradients of the mean loss on the parameters."""
        layout = self.place.layout
        # Where collectives run inside a microbatch every rank runs as many; a spare one repeats data at weight zero.
        mine = self.batching.shares(layout.data_parallel)[layout.data_rank(self.place.rank)]
        slots = -(-self.batching.count // layout.data_parallel) if layout.lockstep else len(mine)
        data_s = 0.0

        def read(slot: int) -> Batch:
            nonlocal data_s
            began = time.perf_counter()
            self.control.mark("loading")
            batch = batch_of(step, slot)
            self.control.mark(self._busy)
            data_s += time.perf_counter() - began
            return batch

        # A row a logical microbatch, filled by one data rank, a column a context-parallel peer: adding up ranks rounds
        # nothing, and the order of the rest is the same for all data-parallel degrees.
        shape = (self.batching.count + 1, layout.cp, 2)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.place.device)
        self.injector.poison(step)
        made = self._counted(self.passes.train(step, slots, read))
        sums[mine.start : mine.stop, self.place.at["cp"]] = made[: len(mine)]
        self.injector.strike(step)
        self.control.mark("saving")
        self.keeper.wait_for_copies()
        self.saver.copied()
        self.control.mark(self._busy)
        asked = (float(self.control.stop_requested), float(self.control.pause_requested))
        sums[-1, 0] = sums.new_tensor(asked)
        with self.watch.on("communication"):
            self._sum_over_ranks(sums)
        by_microbatch = sums[:-1].sum(1)
        totals = torch.cat((pairwise_total(by_microbatch), sums[-1, 0]))
        with self.watch.on("communication"):
            norm = self._clip(totals[1])
        loss_sum, tokens, stop, pause = totals.tolist()
        self._check()
        losses = (by_microbatch[:, 0] / by_microbatch[:, 1].clamp(min=1.0)).tolist()
        return StepResult(loss_sum / tokens, float(norm), stop > 0, pause > 0, data_s, losses)

    def _check(self) -> None:
        """Raise GenerationFallen where collectives were aborted: some come back from that with anything at all."""
        if self.control.aborted:
            raise GenerationFallen("its collectives were aborted")

    def _drop_gradients(self) -> None:
        self.optimizer.drop_gradients()
        self.balance.forget()

    def evaluate(self) -> float | None:
        """Mean loss over the validation windows, shared out over the data-parallel ranks; None if asked to stop."""
        if self.evaluation is None:
            raise RunFailed("evaluation asked for, but the dataset has no validation split")
        layout, batches = self.place.layout, self.evaluation.num_batches
        # Every rank runs the same number of passes: forward passes can hold collectives.
        turns = -(-batches // layout.data_parallel)
        shape = (turns, layout.data_parallel, layout.cp, 2)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.place.device)
        mine = sums[:, layout.data_rank(self.place.rank), self.place.at["cp"]]
        for first in range(0, turns, _ASK_EVERY):
            if self._stop_agreed():
                return None
            read = partial(self._validation_batch, self.evaluation, first)
            mine[first : first + _ASK_EVERY] = self._counted(self.passes.evaluate(min(_ASK_EVERY, turns - first), read))
        self._sum_over_ranks(sums)
        self.watch.read()  # no step's
        loss_sum, tokens = pairwise_total(sums.sum(2).view(-1, 2)[:batches]).tolist()
        return float(loss_sum / tokens)

    def _evaluate_into(self, record: Record) -> bool:
        """Add the validation loss to a step's metrics. False where a stop came first: the next life makes up for it."""
        loss = self.evaluate()
        if loss is not None:
            record["val/loss"] = loss
        return loss is not None

    def _compare_replicas(self, step: int, saving: bool) -> None:
        """If that is due. What is saved has always been compared: it is gone back to."""
        every = self.config.fault.compare_every
        if every > 0 and (saving or step % every == 0):
            self.replicas.compare()
            self.keeper.agreed(step)

    def _compare_times(self, step: int, record: Record) -> None:
        """Every so many steps, how ranks differ in what they took and hold."""
        every = self.config.observe.ranks_every
        if every and step % every == 0:
            mine = {name: record[name] for name in COMPARED}
            record |= over_ranks(mine, self.place.world_group, self.place.device)

    def _save(self, step: int) -> float:
        self.control.mark("saving")
        waited = self.saver.save(step)
        self.optimizer.rest()
        return waited

    def _stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all of them."""
        asked = torch.tensor([float(self.control.stop_requested)], dtype=torch.float64, device=self.place.device)
        self._sum_over_ranks(asked)
        return bool(asked.item() > 0)

    def _validation_batch(self, windows: EvaluationSet, first: int, number: int) -> Batch:
        self.control.mark("evaluating")
        layout = self.place.layout
        index = (first + number) * layout.data_parallel + layout.data_rank(self.place.rank)
        spare = index >= windows.num_batches
        return on_device(windows.batch(0 if spare else index), self.place.device, spare=spare)

    def _counted(self, sums: Tensor) -> Tensor:
        """What of rows of (sum of losses, valid targets) counts in a sum over all ranks: peers compute the same."""
        return sums * sums.new_tensor([self.place.counts_loss, self.place.counts_tokens])

    def _share_buffers(self) -> None:
        """After a step all ranks hold the running statistics of the first."""
        if self.place.world_group is not None:
            for buffer in self.buffers:
                dist.broadcast(buffer, group=self.place.world_group, group_src=0)

    def _sum_over_ranks(self, totals: Tensor) -> None:
        if self.place.world_group is not None:
            dist.all_reduce(totals, group=self.place.world_group)

    def _clip(self, tokens: Tensor) -> Tensor:
        """Turn summed gradients into those of the mean loss, clipped. Returns the norm before clipping."""
        gradients = self.optimizer.gradients()
        self._gradient_bytes = sum(gradient.nbytes for gradient in gradients.values())
        norm = self.norm(gradients) / tokens
        limit = self.config.train.grad_clip
        scale = (limit / (norm + 1e-6)).clamp(max=1.0) / tokens if limit else 1.0 / tokens
        if gradients:
            slices = list(gradients.values())
            torch._foreach_mul_(slices, scale.to(slices[0].dtype))
        return norm

    def _record(self, step: int, result: StepResult, seconds: float) -> Record:
        train, world = self.config.train, self.place.layout.world
        rate = train.global_batch * train.seq_len / seconds
        return {
            "step": step,
            "train/loss": result.loss,
            "train/lr": learning_rate(train, step - 1),
            "train/grad_norm": result.grad_norm,
            "train/tokens": step * train.global_batch * train.seq_len,
            "throughput/tokens_per_sec": rate,
            "throughput/tokens_per_sec_per_device": rate / world,
            "time/unix": time.time(),
            "time/step_s": seconds,
            "time/data_s": result.data_s,
            **{f"time/{part}_s": seconds for part, seconds in self.watch.read().items()},
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": peak_gib(self.place.device),
            **self.held,
            "memory/gradients_gib": self._gradient_bytes / 2**30,
            "elastic/world_size": world,
            "elastic/generation": self.generation,
        }


def peak_gib(device: torch.device) -> float:
    """Peak memory of the device, or resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
