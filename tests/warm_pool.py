"""Warm worker processes for tests: real ranks on gloo, with no Ray between the test and the loop."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config

TIMEOUT_S = 120
PRELOADED_MODULES = [
    "raytrain_hpc.training.factory",
    "raytrain_hpc.parallel.fsdp",
    "raytrain_hpc.state.dtensor",
    "torch._dynamo",
]


def make_forkserver_context() -> ForkServerContext:
    """Where processes begin with all of torch that ranks use: a server imports it once.

    Not forked from here, where tests may have left threads. The server has those of OpenBLAS and jemalloc, which are
    made for that.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED_MODULES)
    return context


class RankFailedError(Exception):
    """A rank raised; the message is its traceback."""


class WarmPool:
    """Processes, forked as needed, that run one generation after another."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long ranks may take to answer."""
        self._timeout_s = timeout_s
        self._context = make_forkserver_context()
        self._processes: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._generation = 0

    def train(self, config: Config, *, custom: Any = None, resume_step: int | None = None, steps_to: int | None = None):
        """Run `config` on cluster.workers ranks. Returns each rank's records; publishes the checkpoints they write."""
        from raytrain_hpc.driver.run_setup import prepare_run

        world = int(config.cluster.workers)
        self._ensure_size(world)
        self._generation += 1
        prepared = prepare_run(config, custom, lambda line: None)
        prepared.directory.path.mkdir(parents=True, exist_ok=True)  # the lease does, of a driver
        spec = _make_worker_spec(prepared, world, self._generation, resume_step, steps_to)
        records = self._call_on_ranks(_train, world, spec)
        self._publish(prepared, spec.batching, records)
        return records

    def inspect_trainers(self, function: Callable[..., Any], config: Config, *, build: bool = True) -> list[Any]:
        """Build the trainer of `config` on cluster.workers ranks. Returns what `function(trainer)` gave on each.

        Without `build`, what `function(rank, meeting, spec)` gave.
        """
        from raytrain_hpc.driver.run_setup import prepare_run

        world = int(config.cluster.workers)
        spec = _make_worker_spec(prepare_run(config, None, lambda line: None), world, self._generation + 1, None, None)
        return self.call(_inspect_trainer, world, spec, function) if build else self.call(function, world, spec)

    def call(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        """Run `function(rank, meeting, *arguments)` on ranks 0..world-1. Returns what each returned."""
        self._ensure_size(world_size)
        self._generation += 1
        return self._call_on_ranks(function, world_size, *arguments)

    def _call_on_ranks(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
        from raytrain_hpc.distributed.rendezvous import Rendezvous

        meeting = Rendezvous("127.0.0.1", self._store.port, self._generation, 60.0)
        return self._run_jobs([partial(function, rank, meeting, *arguments) for rank in range(world_size)])

    def close(self) -> None:
        for process, connection in self._processes:
            connection.close()
            process.kill()
            process.join()
        self._processes = []

    def _publish(self, prepared: Any, batching: Any, records: list[list[dict[str, Any]]]) -> None:
        from raytrain_hpc.checkpoint.manifest import ShardReport

        shards: dict[int, list[ShardReport]] = {}
        for record in (record for of_rank in records for record in of_rank if record["type"] == "shard"):
            shards.setdefault(record["step"], []).append(ShardReport.from_json(record["shard"]))
        for step, reports in shards.items():
            prepared.store.publish(step, self._generation, reports, prepared.meta(batching)(step), lambda: None)

    def _ensure_size(self, world_size: int) -> None:
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._processes) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append((process, ours))

    def _run_jobs(self, jobs: list[Any]) -> list[list[dict[str, Any]]]:
        for (_, connection), job in zip(self._processes, jobs, strict=False):
            connection.send(job)
        answers = []
        for _, connection in self._processes[: len(jobs)]:
            if not connection.poll(self._timeout_s):
                self.close()
                raise RankFailedError(f"no answer within {self._timeout_s:g} s")
            answers.append(connection.recv())
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self.close()  # the survivors may be left inside a broken group
            raise RankFailedError("\n".join(failures))
        return answers


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a daemon may have no children
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from raytrain_hpc.distributed.process_groups import destroy_process_groups

    torch.set_num_threads(1)  # it has been imported where OMP_NUM_THREADS was another
    gc.freeze()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            connection.send(job())
        except Exception:
            connection.send(traceback.format_exc())
        finally:
            destroy_process_groups()


def make_worker_spec(config: Config, world_size: int, *, steps_to: int) -> Any:
    """What the driver would hand to the ranks of a first generation that trains to `steps_to`."""
    from raytrain_hpc.driver.run_setup import prepare_run

    return _make_worker_spec(prepare_run(config, None, lambda line: None), world_size, 1, None, steps_to)


def _make_worker_spec(
    prepared: Any, world_size: int, generation: int, resume_step: int | None, steps_to: int | None
) -> Any:
    from raytrain_hpc.runtime.worker_spec import WorkerSpec

    layout, batching = prepared.layout(world_size)
    return WorkerSpec(
        config=prepared.config,
        layout=layout,
        batching=batching,
        model_spec=prepared.shape,
        custom=prepared.custom,
        generation=generation,
        resume_step=resume_step,
        end_step=prepared.config.train.steps if steps_to is None else steps_to,
        init_checkpoint=prepared.initial,
    )


def _inspect_trainer(rank: int, rendezvous: Any, spec: Any, function: Callable[..., Any]) -> Any:
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    return function(build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel()))


def _train(rank: int, rendezvous: Any, spec: Any) -> list[dict[str, Any]]:
    import torch

    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.training.builder import build_trainer

    control = ControlChannel()
    trainer = build_trainer(spec, rank, torch.device("cpu"), rendezvous, control)
    trainer.run(spec.first, spec.steps_to)
    return control.drain()


SMALL_OVERRIDES = [
    "data.path=synthetic",
    "data.engine=local",
    "model.vocab_size=64",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "train.steps=5",
    "train.warmup=2",
    "train.seq_len=16",
    "train.global_batch=12",
    "train.eval_samples=4",
    "cluster.workers=1",
    "observe.tensorboard=false",
    "observe.sample_tokens=0",
]


def make_small_config(directory: Path | str | None = None, *overrides: str) -> Config:
    """A config small enough for tests: a tiny decoder on synthetic tokens, one thread, no extras."""
    directory = directory or tempfile.mkdtemp(prefix="run-")
    return load_config(None, [f"run.dir={directory}", *SMALL_OVERRIDES, *overrides])


def get_step_metrics(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of the steps among a rank's records."""
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
