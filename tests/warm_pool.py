"""Warm worker processes for tests: real ranks on gloo or NCCL, without Ray between the test and the trainer."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config

if TYPE_CHECKING:
    import torch

    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.driver.run_setup import PreparedRun
    from raytrain_hpc.planner.layout import Batching
    from raytrain_hpc.runtime.worker_spec import LocalCheckpoint, WorkerSpec

TIMEOUT_S = 240  # the compiler takes a minute on a busy machine
PRELOADED_MODULES = [
    "raytrain_hpc.training.factory",
    "raytrain_hpc.parallel.fsdp",
    "raytrain_hpc.state.dtensor",
    "torch._dynamo",
]


def make_forkserver_context() -> ForkServerContext:
    """Return a context whose processes start with torch and the modules of a rank already imported.

    They are forked from a server process, which imports the modules once, and not from this process, in which tests may
    have left threads. The server has threads of OpenBLAS and jemalloc only, which support forking.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    return context


class RankFailedError(Exception):
    """A rank raised an exception; the message is its traceback."""


class WarmPool:
    """A pool of worker processes that run one generation after another; created on demand and kept warm."""

    def __init__(self, timeout_s: float = TIMEOUT_S, device: str = "cpu") -> None:
        """Create an empty pool.

        `timeout_s`: limit for the answers of all ranks to one call. `device`: of the trainers, "cpu" or "cuda". All
        ranks share the first GPU (see `_share_one_gpu`).
        """
        self._timeout_s = timeout_s
        self._device = device
        self._context = make_forkserver_context()
        self._processes: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._generation = 0

    def train(
        self,
        config: Config,
        *,
        custom: Any = None,
        callbacks: Sequence[Any] = (),
        resume_step: int | None = None,
        local_checkpoint: LocalCheckpoint | None = None,
        steps_to: int | None = None,
        start_metrics: dict[str, Any] | None = None,
        lr_schedule: Callable[[int], float] | None = None,
    ):
        """Train `config` on cluster.workers ranks and publish the checkpoints. Return the records of each rank.

        `custom`: a CustomModel or Script. `callbacks`: those of the user. `resume_step`: the checkpoint to start from,
        in run.dir unless `local_checkpoint` is given.
        `steps_to`: the last step; default: train.steps. `start_metrics`: recorded metrics of the start step.
        `lr_schedule`: instead of lr_scheduler.name.
        """
        world_size = int(config.cluster.workers)
        self._ensure_size(world_size)
        self._generation += 1
        prepared = prepare_run_on_cpu(config, custom)
        prepared.directory.path.mkdir(parents=True, exist_ok=True)  # in a driver, the lease creates it
        spec = _make_worker_spec(prepared, world_size, self._generation, resume_step, steps_to)
        spec = replace(spec, callbacks=tuple(callbacks), start_metrics=start_metrics, lr_schedule=lr_schedule)
        spec = replace(spec, local_checkpoint=local_checkpoint)
        records = self._call_on_ranks(_train, world_size, spec, self._device)
        self._publish(prepared, spec.batching, records)
        return records

    def inspect_trainers(self, function: Callable[..., Any], config: Config, *, build: bool = True) -> list[Any]:
        """Build the trainer of `config` on cluster.workers ranks and call `function(trainer)`. Return the results.

        With `build=False`, no trainer is built and `function(rank, rendezvous, spec)` is called.
        """
        world_size = int(config.cluster.workers)
        prepared = prepare_run_on_cpu(config)
        spec = _make_worker_spec(prepared, world_size, self._generation + 1, None, None)
        if build:
            return self.call(_inspect_trainer, world_size, spec, function, self._device)
        return self.call(function, world_size, spec)

    def call(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Call `function(rank, rendezvous, *arguments)` on ranks 0..world_size-1. Return the results by rank."""
        self._ensure_size(world_size)
        self._generation += 1
        return self._call_on_ranks(function, world_size, *arguments)

    def _call_on_ranks(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        from raytrain_hpc.distributed.rendezvous import Rendezvous

        rendezvous = Rendezvous("127.0.0.1", self._store.port, self._generation, 60.0)
        return self._run_jobs([partial(function, rank, rendezvous, *arguments) for rank in range(world_size)])

    def close(self) -> None:
        """Kill all processes."""
        for process, connection in self._processes:
            connection.close()
            process.kill()
            process.join()
        self._processes = []

    def _publish(self, prepared: PreparedRun, batching: Batching, records: list[list[dict[str, Any]]]) -> None:
        """Publish the checkpoints whose shards the ranks have reported."""
        from raytrain_hpc.checkpoint.manifest import ShardReport

        shards: dict[tuple[str, int], list[ShardReport]] = {}
        for record in (record for rank_records in records for record in rank_records if record["type"] == "shard"):
            shards.setdefault((record["tier"], record["step"]), []).append(ShardReport.from_json(record["shard"]))
        make_metadata = prepared.make_checkpoint_metadata(batching)
        for (tier, step), reports in shards.items():
            store: Any = prepared.store if tier == "run" else prepared.local_catalog
            store.publish(step, self._generation, reports, make_metadata(step), lambda: None)

    def _ensure_size(self, world_size: int) -> None:
        """Start processes until there are at least `world_size`."""
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._processes) < world_size:
            own_end, worker_end = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(worker_end, len(self._processes)), daemon=True)
            process.start()
            worker_end.close()
            self._processes.append((process, own_end))

    def _run_jobs(self, jobs: list[Any]) -> list[list[dict[str, Any]]]:
        """Run one job per process and return the results. Raises RankFailedError if any failed or timed out."""
        for (_, connection), job in zip(self._processes, jobs, strict=False):
            connection.send_bytes(pickle.dumps(job))  # `send` would share the memory of tensors between ranks
        answers = []
        for _, connection in self._processes[: len(jobs)]:
            if not connection.poll(self._timeout_s):
                self.close()
                raise RankFailedError(f"no answer within {self._timeout_s:g} s")
            answers.append(connection.recv())
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self.close()  # the other ranks may be left inside a broken group
            raise RankFailedError("\n".join(failures))
        return answers


def _share_one_gpu(rank: int) -> None:
    """Let NCCL form groups of ranks that share a GPU; it refuses two ranks of one host on the same device.

    Each rank claims to be a host of its own, and they communicate through sockets as on different nodes.
    """
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    os.environ |= {"NCCL_NET": "Socket", "NCCL_MAX_NCHANNELS": "2"}
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # as in a worker


def _serve(connection: Connection, rank: int) -> None:
    """Run jobs in a worker process until the pool closes the connection."""
    _share_one_gpu(rank)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a daemon process cannot have children
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from raytrain_hpc.distributed.process_groups import destroy_process_groups

    torch.set_num_threads(1)  # the server imported torch with another OMP_NUM_THREADS
    gc.freeze()
    while True:
        try:
            job = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            connection.send(job())
        except Exception:  # of any kind: the pool raises it as RankFailedError in the test
            connection.send(traceback.format_exc())
        finally:
            destroy_process_groups()


def prepare_run_on_cpu(config: Config, custom: Any = None) -> PreparedRun:
    """Prepare a run, with the settings that the driver chooses on a machine without accelerators."""
    from raytrain_hpc.driver.run_setup import prepare_run
    from raytrain_hpc.planner.hardware_defaults import resolve_compile, resolve_dtype

    prepared = prepare_run(config, custom, lambda line: None)
    config = resolve_compile(resolve_dtype(prepared.config, has_bf16=False), has_accelerator=False)
    return replace(prepared, config=config)


def make_worker_spec(config: Config, world_size: int, *, steps_to: int, custom: Any = None) -> Any:
    """Return the worker spec of a first generation that trains to `steps_to`, as the driver builds it."""
    return _make_worker_spec(prepare_run_on_cpu(config, custom), world_size, 1, None, steps_to)


def _make_worker_spec(
    prepared: PreparedRun, world_size: int, generation: int, resume_step: int | None, steps_to: int | None
) -> WorkerSpec:
    from raytrain_hpc.runtime.worker_spec import WorkerSpec

    layout, batching = prepared.resolve_layout(world_size)
    return WorkerSpec(
        config=prepared.config,
        layout=layout,
        batching=batching,
        model_spec=prepared.model_spec,
        dataset_hash=prepared.dataset.dataset_hash,
        custom=prepared.custom,
        generation=generation,
        resume_step=resume_step,
        end_step=prepared.config.train.steps if steps_to is None else steps_to,
        init_checkpoint=prepared.init_checkpoint,
    )


def _inspect_trainer(
    rank: int, rendezvous: Rendezvous, spec: WorkerSpec, function: Callable[..., Any], device: str
) -> Any:
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    return function(build_trainer(spec, rank, _get_device(device), rendezvous, ControlChannel()))


def _get_device(name: str) -> torch.device:
    import torch

    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def _train(rank: int, rendezvous: Rendezvous, spec: WorkerSpec, device: str) -> list[dict[str, Any]]:
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    control = ControlChannel()
    trainer = build_trainer(spec, rank, _get_device(device), rendezvous, control)
    trainer.run(spec.start_step, spec.end_step)
    return control.drain()


SMALL_OVERRIDES = [
    "data.path=synthetic",
    "data.engine=local",
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "train.steps=5",
    "lr_scheduler.warmup_steps=2",
    "train.seq_len=16",
    "train.global_batch_size=12",
    "eval.samples=4",
    "cluster.workers=1",
    "logging.tensorboard=false",
    "logging.sample_tokens=0",
]


@cache
def _make_runs_directory() -> tempfile.TemporaryDirectory[str]:
    """Create a directory for the runs of this process; it is removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="runs-")


def make_small_config(directory: Path | str | None = None, *overrides: str) -> Config:
    """Return a config small enough for tests: a tiny decoder on synthetic tokens, without TensorBoard and samples."""
    directory = directory or tempfile.mkdtemp(dir=_make_runs_directory().name)
    return load_config(None, [f"run.dir={directory}", *SMALL_OVERRIDES, *overrides])


def get_step_metrics(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of all steps in a rank's records."""
    return [record["metrics"] for record in records if record["type"] == "step"]


__all__ = [
    "PRELOADED_MODULES",
    "SMALL_OVERRIDES",
    "RankFailedError",
    "WarmPool",
    "make_small_config",
    "make_worker_spec",
    "get_step_metrics",
]
