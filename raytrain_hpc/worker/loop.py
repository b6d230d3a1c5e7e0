"""The training loop: one step, readable top to bottom, and what comes between steps."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.config import Config
from raytrain_hpc.data.evaluation import EvaluationSet
from raytrain_hpc.data.stream import LocalStream, Microbatch
from raytrain_hpc.errors import RunFailed
from raytrain_hpc.observe.profiling import StepProfiler
from raytrain_hpc.parallel.apply import Parallel, autocast
from raytrain_hpc.plan.layout import Batching
from raytrain_hpc.worker.control import Record
from raytrain_hpc.worker.groups import Place
from raytrain_hpc.worker.norm import GradientNorm
from raytrain_hpc.worker.optim import Optimizer
from raytrain_hpc.worker.saving import Saver
from raytrain_hpc.worker.schedule import evaluates, learning_rate
from raytrain_hpc.worker.task import Task

_ASK_EVERY = 8  # evaluation passes between two looks at whether to stop


@dataclass
class StepResult:
    """What one committed step gave, the same on every rank."""

    loss: float
    grad_norm: float
    stop: bool
    data_s: float


@dataclass
class Trainer:
    """The parts of one rank, put together by worker.build."""

    config: Config
    place: Place
    batching: Batching
    task: Task
    parallel: Parallel
    optimizer: Optimizer
    norm: GradientNorm
    stream: LocalStream
    evaluation: EvaluationSet | None
    saver: Saver
    profiler: StepProfiler
    generation: int
    emit: Callable[[Record], None]
    stop_requested: Callable[[], bool]
    unevaluated: Record | None = None

    def run(self, first: int, steps_to: int) -> str:
        """Train from `first` committed steps to `steps_to` and save. Returns "done" or "stopped"."""
        step, stopped = first, False
        if self.unevaluated is not None:
            stopped = not self._evaluate_into(self.unevaluated)
            if not stopped:
                self.emit({"type": "step", "metrics": self.unevaluated})
        while step < steps_to and not stopped:
            began = time.perf_counter()
            with self.profiler.step(step):
                result = self.train_step(step)
            step += 1
            stopped = result.stop and step < steps_to
            record = self._record(step, result, time.perf_counter() - began)
            saving = self.saver.due(step) or step == steps_to or stopped
            if saving:  # before the evaluation, which can take its time
                record["time/checkpoint_s"] = self.saver.save(step)
            if not stopped and self.evaluation is not None and evaluates(self.config.train, step, steps_to):
                stopped = not self._evaluate_into(record)
                if stopped and not saving:
                    record["time/checkpoint_s"] = self.saver.save(step)
            self.emit({"type": "step", "metrics": record})
        self.saver.finish()
        return "stopped" if stopped else "done"

    def train_step(self, step: int) -> StepResult:
        """One optimizer step over this rank's microbatches. Raises RunFailed on a loss that is not finite."""
        mine = self.batching.shares(self.place.layout.data_parallel)[self.place.layout.data_rank(self.place.rank)]
        # Where collectives run inside a microbatch every rank runs as many; a spare one repeats data at weight zero.
        slots = -(-self.batching.count // self.place.layout.data_parallel) if self.place.layout.lockstep else len(mine)
        totals = torch.zeros(3, dtype=torch.float64, device=self.place.device)
        data_s = 0.0
        self.parallel.forward.train()
        for slot in range(slots):
            real = slot < len(mine)
            began = time.perf_counter()
            batch = self.stream.microbatch(step, mine[slot] if real else mine[-1])
            data_s += time.perf_counter() - began
            with self.parallel.microbatch(first=slot == 0, last=slot == slots - 1):
                loss = self._loss(batch, step)
                (loss if real else loss * 0.0).backward()  # type: ignore[no-untyped-call]
            if real:
                totals[0] += loss.detach() * self.place.counts_loss
                totals[1] += batch.valid_tokens * self.place.counts_tokens
        totals[2] = float(self.stop_requested())
        self._sum_over_ranks(totals)
        norm = self._clip(totals[1])
        self.optimizer.step(learning_rate(self.config.train, step))
        self._share_buffers()
        loss_sum, tokens, stop = totals.tolist()
        result = StepResult(loss_sum / tokens, float(norm), stop > 0, data_s)
        if not (abs(result.loss) < float("inf") and result.grad_norm < float("inf")):
            raise RunFailed(
                f"step {step + 1}: loss {result.loss} and gradient norm {result.grad_norm}: not finite; lower "
                "train.lr, check the data, or use train.dtype=fp32. The newest checkpoint is from before this step"
            )
        return result

    def evaluate(self) -> float | None:
        """Mean loss over the validation windows, shared out over the data-parallel ranks; None if asked to stop."""
        if self.evaluation is None:
            raise RunFailed("evaluation asked for, but the dataset has no validation split")
        degree = self.place.layout.data_parallel
        mine = self.place.layout.data_rank(self.place.rank)
        totals = torch.zeros(2, dtype=torch.float64, device=self.place.device)
        self.parallel.forward.eval()
        with torch.no_grad():
            # Every rank runs the same number of passes: forward passes can hold collectives.
            for turn in range(-(-self.evaluation.num_batches // degree)):
                if turn % _ASK_EVERY == 0 and self._stop_agreed():
                    return None
                index = turn * degree + mine
                real = index < self.evaluation.num_batches
                batch = self.evaluation.batch(index if real else 0)
                loss = self._loss(batch, 0)
                if real:
                    totals[0] += loss * self.place.counts_loss
                    totals[1] += batch.valid_tokens * self.place.counts_tokens
        self._sum_over_ranks(totals)
        loss_sum, tokens = totals.tolist()
        return float(loss_sum / tokens)

    def _evaluate_into(self, record: Record) -> bool:
        """Add the validation loss to a step's metrics. False where a stop came first: the next life makes up for it."""
        loss = self.evaluate()
        if loss is not None:
            record["val/loss"] = loss
        return loss is not None

    def _stop_agreed(self) -> bool:
        """Whether any rank was asked to stop: the same answer on all of them."""
        asked = torch.tensor([float(self.stop_requested())], dtype=torch.float64, device=self.place.device)
        self._sum_over_ranks(asked)
        return bool(asked.item() > 0)

    def _loss(self, batch: Microbatch, step: int) -> Tensor:
        inputs, targets, samples = (
            torch.from_numpy(part).to(self.place.device, non_blocking=True)
            for part in (batch.inputs, batch.targets, batch.samples)
        )
        with autocast(self.config.train.dtype, self.place.device):
            return self.task.loss(self.parallel.forward, inputs, targets, step, samples)

    def _share_buffers(self) -> None:
        """Running statistics depend on the data that a rank saw: after a step all ranks hold those of the first."""
        if self.place.world_group is not None:
            for buffer in self.parallel.forward.buffers():
                dist.broadcast(buffer, group=self.place.world_group, group_src=0)

    def _sum_over_ranks(self, totals: Tensor) -> None:
        if self.place.world_group is not None:
            dist.all_reduce(totals, group=self.place.world_group)

    def _clip(self, tokens: Tensor) -> Tensor:
        """Turn summed gradients into those of the mean loss, clipped. Returns the norm before clipping."""
        gradients = self.optimizer.gradients()
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
            "time/checkpoint_s": 0.0,
            "memory/peak_gib": self._peak_gib(),
            "elastic/world_size": world,
            "elastic/generation": self.generation,
        }

    def _peak_gib(self) -> float:
        if self.place.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.place.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
