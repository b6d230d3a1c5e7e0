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
from raytrain_hpc.distributed.process_groups import GenerationAbortedError, ParallelContext
from raytrain_hpc.distributed.replica_check import ReplicaCheck
from raytrain_hpc.elastic.watchdog import Phase
from raytrain_hpc.errors import RunFailedError
from raytrain_hpc.observability.metrics import RANK_STATISTIC_KEYS
from raytrain_hpc.observability.profiler import StepProfiler
from raytrain_hpc.optim.grad_norm import GradientNorm
from raytrain_hpc.optim.lr_scheduler import learning_rate, should_evaluate
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.parallel.pairwise_sum import sum_pairwise
from raytrain_hpc.planner.layout import Batching
from raytrain_hpc.runtime.control_channel import ControlChannel, Record
from raytrain_hpc.runtime.fault_injection import FaultInjector
from raytrain_hpc.training.checkpointer import Checkpointer
from raytrain_hpc.training.device_loader import DeviceLoader, move_to_device
from raytrain_hpc.training.expert_bias import ExpertBias
from raytrain_hpc.training.forward_backward import ForwardBackward
from raytrain_hpc.training.snapshot_manager import SnapshotManager
from raytrain_hpc.training.step_guard import StepGuard
from raytrain_hpc.training.timers import PhaseTimer, StepTimer, reduce_over_ranks
from raytrain_hpc.training.train_module import Batch

TrainOutcome = Literal["done", "stopped", "paused"]

_STOP_CHECK_INTERVAL = 8  # evaluation passes between two looks at whether to stop


@dataclass
class StepResult:
    """What one committed step gave, the same on every rank."""

    loss: float
    grad_norm: float
    stop: bool
    pause: bool
    data_s: float
    microbatch_losses: list[float]  # of the step's microbatches, one by one


@dataclass
class Trainer:
    """The parts of one rank, put together by worker.build."""

    config: Config
    context: ParallelContext
    batching: Batching
    model_step: ForwardBackward
    timers: PhaseTimer
    buffers: list[Tensor]  # running statistics, which depend on the data that a rank saw
    expert_bias: ExpertBias
    step_guard: StepGuard
    optimizer: Optimizer
    gradient_norm: GradientNorm
    loader: DeviceLoader
    eval_set: EvaluationSet | None
    checkpointer: Checkpointer
    profiler: StepProfiler
    generation: int
    emit: Callable[[Record], None]
    control: ControlChannel
    snapshots: SnapshotManager
    replica_check: ReplicaCheck
    fault_injector: FaultInjector
    memory_metrics: dict[str, float]  # GiB of weights and moments here, under their metric keys
    pending_eval_metrics: Record | None = None
    has_pending_checkpoint: bool = False

    def __post_init__(self) -> None:
        # The first step of a generation may wait for a compiler.
        self._gradient_bytes = 0
        self._busy_phase: Phase = "building" if self.config.train.compile else "training"

    def run(self, start_step: int, end_step: int) -> TrainOutcome:
        """Train from `first` committed steps to `steps_to` and save, unless stopped or paused before."""
        with self.loader.prefetch(start_step, end_step), self.snapshots.close_on_exit():
            outcome = self._train_loop(start_step, end_step)
            self.control.set_phase("saving")
        self.checkpointer.finish()
        return outcome

    def _train_loop(self, start_step: int, end_step: int) -> TrainOutcome:
        step, stopped, paused = start_step, False, False
        if self.has_pending_checkpoint:
            self._save_checkpoint(start_step)
        if self.pending_eval_metrics is not None:
            stopped = not self._evaluate_into(self.pending_eval_metrics)
            if not stopped:
                self.emit({"type": "step", "metrics": self.pending_eval_metrics})
        laps = StepTimer()
        while step < end_step and not (stopped or paused):
            with self.profiler.profile_step(step):
                result = self.train_step(step)
            step += 1
            stopped, paused = result.stop and step < end_step, result.pause and step < end_step
            self.fault_injector.post_step(step, self.snapshots.state)
            saving = self.checkpointer.should_save(step) or step == end_step or stopped
            self.snapshots.after_step(step, is_last=paused)
            record = self._build_metrics(step, result, laps.end_step())
            self.control.record_commit(record)
            self._check_replicas(step, saving)
            self._record_rank_stats(step, record)
            self._busy_phase = "training"
            with laps.exclude():
                if saving:  # before the evaluation, which can take its time
                    record["time/checkpoint_s"] = self._save_checkpoint(step)
                if not (stopped or paused) and self.eval_set and should_evaluate(self.config.train, step, end_step):
                    stopped = not self._evaluate_into(record)
                    if stopped and not saving:
                        record["time/checkpoint_s"] = self._save_checkpoint(step)
            self.control.amend_metrics(record)
            self.emit({"type": "step", "metrics": record})
        return "stopped" if stopped else "paused" if paused else "done"

    def train_step(self, step: int) -> StepResult:
        """One optimizer step over this rank's microbatches, of which nothing is applied before its numbers are seen.

        Where they are bad the step is computed once more: a bit that flipped is not there any more. Raises RunFailed
        where they still are, unless fault.on_nan goes on without such a step.
        """
        result = self.forward_backward(step, self.loader.next_batch)
        if self.step_guard.check(result.loss, result.grad_norm) is not None:
            result, taken = self.retry_step(step, result)
            if not taken:
                return result
        self.sync_buffers()
        self.snapshots.before_update()
        with self.timers.phase("optimizer"):
            self.optimizer.step(learning_rate(self.config.train, step))
        self.expert_bias.update()
        self.step_guard.accept(step, result.loss)
        self.raise_if_aborted()
        return result

    def retry_step(self, step: int, bad: StepResult) -> tuple[StepResult, bool]:
        """Compute a step again, and see to it where it is as bad. Returns what it gave, and whether that is taken."""
        incident = self.step_guard.build_incident(step, (bad.loss, bad.grad_norm), bad.microbatch_losses)
        self._discard_gradients()
        result = self.forward_backward(step, self.loader.reread)
        if self.step_guard.check(result.loss, result.grad_norm) is None:
            self.step_guard.report_incident(incident, "gone when computed again", 0)
            return result, True
        self._discard_gradients()
        self.snapshots.before_update()
        self.control.set_phase("saving")
        undone = self.step_guard.reject(step, result.loss, result.grad_norm)
        self.optimizer.skip_step()
        back = f"; went back to the state of step {step - undone}" if undone else ""
        self.step_guard.report_incident(incident, f"the same when computed again{back}", undone)
        return result, False

    def forward_backward(self, step: int, next_batch: Callable[[int, int], Batch]) -> StepResult:
        """Leave the clipped gradients of the mean loss on the parameters."""
        layout = self.context.layout
        # Where collectives run inside a microbatch every rank runs as many; a spare one repeats data at weight zero.
        mine = self.batching.split_by_rank(layout.dp_size)[layout.get_dp_rank(self.context.rank)]
        slots = -(-self.batching.count // layout.dp_size) if layout.is_lockstep else len(mine)
        data_s = 0.0

        def read(slot: int) -> Batch:
            nonlocal data_s
            began = time.perf_counter()
            self.control.set_phase("loading")
            batch = next_batch(step, slot)
            self.control.set_phase(self._busy_phase)
            data_s += time.perf_counter() - began
            return batch

        # A row a logical microbatch, filled by one data rank, a column a context-parallel peer: adding up ranks rounds
        # nothing, and the order of the rest is the same for all data-parallel degrees.
        shape = (self.batching.count + 1, layout.cp, 2)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.context.device)
        self.fault_injector.pre_forward(step)
        made = self._mask_duplicates(self.model_step.train(step, slots, read))
        sums[mine.start : mine.stop, self.context.coordinates["cp"]] = made[: len(mine)]
        self.fault_injector.pre_reduce(step)
        self.control.set_phase("saving")
        self.snapshots.wait_for_copies()
        self.checkpointer.wait_for_staging()
        self.control.set_phase(self._busy_phase)
        asked = (float(self.control.stop_requested), float(self.control.pause_requested))
        sums[-1, 0] = sums.new_tensor(asked)
        with self.timers.phase("communication"):
            self._all_reduce(sums)
        by_microbatch = sums[:-1].sum(1)
        totals = torch.cat((sum_pairwise(by_microbatch), sums[-1, 0]))
        with self.timers.phase("communication"):
            norm = self._clip_gradients(totals[1])
        loss_sum, tokens, stop, pause = totals.tolist()
        self.raise_if_aborted()
        losses = (by_microbatch[:, 0] / by_microbatch[:, 1].clamp(min=1.0)).tolist()
        return StepResult(loss_sum / tokens, float(norm), stop > 0, pause > 0, data_s, losses)

    def raise_if_aborted(self) -> None:
        """Raise GenerationFallen where collectives were aborted: some come back from that with anything at all."""
        if self.control.is_aborted:
            raise GenerationAbortedError("its collectives were aborted")

    def _discard_gradients(self) -> None:
        self.optimizer.zero_grad()
        self.expert_bias.reset_counts()

    def evaluate(self) -> float | None:
        """Mean loss over the validation windows, shared out over the data-parallel ranks; None if asked to stop."""
        if self.eval_set is None:
            raise RunFailedError("evaluation asked for, but the dataset has no validation split")
        layout, batches = self.context.layout, self.eval_set.num_batches
        # Every rank runs the same number of passes: forward passes can hold collectives.
        turns = -(-batches // layout.dp_size)
        shape = (turns, layout.dp_size, layout.cp, 2)
        sums = torch.zeros(shape, dtype=torch.float64, device=self.context.device)
        mine = sums[:, layout.get_dp_rank(self.context.rank), self.context.coordinates["cp"]]
        for first in range(0, turns, _STOP_CHECK_INTERVAL):
            if self._is_stop_agreed():
                return None
            read = partial(self._read_eval_batch, self.eval_set, first)
            mine[first : first + _STOP_CHECK_INTERVAL] = self._mask_duplicates(
                self.model_step.evaluate(min(_STOP_CHECK_INTERVAL, turns - first), read)
            )
        self._all_reduce(sums)
        self.timers.read_and_reset()  # no step's
        loss_sum, tokens = sum_pairwise(sums.sum(2).view(-1, 2)[:batches]).tolist()
        return float(loss_sum / tokens)

    def _evaluate_into(self, record: Record) -> bool:
        """Add the validation loss to a step's metrics. False where a stop came first: the next life makes up for it."""
        loss = self.evaluate()
        if loss is not None:
            record["val/loss"] = loss
        return loss is not None

    def _check_replicas(self, step: int, saving: bool) -> None:
        """If that is due. What is saved has always been compared: it is gone back to."""
        every = self.config.fault.compare_every
        if every > 0 and (saving or step % every == 0):
            self.replica_check.compare()
            self.snapshots.mark_verified(step)

    def _record_rank_stats(self, step: int, record: Record) -> None:
        """Every so many steps, how ranks differ in what they took and hold."""
        every = self.config.observe.ranks_every
        if every and step % every == 0:
            mine = {name: record[name] for name in RANK_STATISTIC_KEYS}
            record |= reduce_over_ranks(mine, self.context.world_group, self.context.device)

    def _save_checkpoint(self, step: int) -> float:
        self.control.set_phase("saving")
        waited = self.checkpointer.save(step)
        self.optimizer.release_memory()
        return waited

    def _is_stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all of them."""
        asked = torch.tensor([float(self.control.stop_requested)], dtype=torch.float64, device=self.context.device)
        self._all_reduce(asked)
        return bool(asked.item() > 0)

    def _read_eval_batch(self, eval_set: EvaluationSet, first: int, number: int) -> Batch:
        self.control.set_phase("evaluating")
        layout = self.context.layout
        index = (first + number) * layout.dp_size + layout.get_dp_rank(self.context.rank)
        spare = index >= eval_set.num_batches
        return move_to_device(eval_set.get_batch(0 if spare else index), self.context.device, is_padding=spare)

    def _mask_duplicates(self, sums: Tensor) -> Tensor:
        """What of rows of (sum of losses, valid targets) counts in a sum over all ranks: peers compute the same."""
        return sums * sums.new_tensor([self.context.should_count_loss, self.context.should_count_tokens])

    def sync_buffers(self) -> None:
        """After a step all ranks hold the running statistics of the first."""
        if self.context.world_group is not None:
            for buffer in self.buffers:
                dist.broadcast(buffer, group=self.context.world_group, group_src=0)

    def _all_reduce(self, totals: Tensor) -> None:
        if self.context.world_group is not None:
            dist.all_reduce(totals, group=self.context.world_group)

    def _clip_gradients(self, num_tokens: Tensor) -> Tensor:
        """Turn summed gradients into those of the mean loss, clipped. Returns the norm before clipping."""
        gradients = self.optimizer.get_gradients()
        self._gradient_bytes = sum(gradient.nbytes for gradient in gradients.values())
        norm = self.gradient_norm(gradients) / num_tokens
        limit = self.config.train.grad_clip
        scale = (limit / (norm + 1e-6)).clamp(max=1.0) / num_tokens if limit else 1.0 / num_tokens
        if gradients:
            slices = list(gradients.values())
            torch._foreach_mul_(slices, scale.to(slices[0].dtype))
        return norm

    def _build_metrics(self, step: int, result: StepResult, seconds: float) -> Record:
        train, world = self.config.train, self.context.layout.world_size
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
            **{f"time/{part}_s": seconds for part, seconds in self.timers.read_and_reset().items()},
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": get_peak_memory_gib(self.context.device),
            **self.memory_metrics,
            "memory/gradients_gib": self._gradient_bytes / 2**30,
            "elastic/world_size": world,
            "elastic/generation": self.generation,
        }


def get_peak_memory_gib(device: torch.device) -> float:
    """Peak memory of the device, or resident memory of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
