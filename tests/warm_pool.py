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
PRELOADED = [
    "raytrain_hpc.training.factory",
    "raytrain_hpc.parallel.fsdp",
    "raytrain_hpc.state.dtensor",
    "torch._dynamo",
]


def forked() -> ForkServerContext:
    """Where processes begin with all of torch that ranks use: a server imports it once.

    Not forked from here, where tests may have left threads. The server has those of OpenBLAS and jemalloc, which are
    made for that.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailed(Exception):
    """A rank raised; the message is its traceback."""


class WarmPool:
    """Processes, forked as needed, that run one generation after another."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        """`timeout_s`: how long ranks may take to answer."""
        self._timeout_s = timeout_s
        self._context = forked()
        self._members: list[tuple[Any, Connection]] = []
        self._store: Any = None
        self._generation = 0

    def train(self, config: Config, *, custom: Any = None, resume_step: int | None = None, steps_to: int | None = None):
        """Run `config` on cluster.workers ranks. Returns each rank's records; publishes the checkpoints they write."""
        from raytrain_hpc.driver.run_setup import prepare_run

        world = int(config.cluster.workers)
        self._ensure(world)
        self._generation += 1
        prepared = prepare_run(config, custom, lambda line: None)
        prepared.directory.path.mkdir(parents=True, exist_ok=True)  # the lease does, of a driver
        spec = _spec(prepared, world, self._generation, resume_step, steps_to)
        records = self._everywhere(_train, world, spec)
        self._publish(prepared, spec.batching, records)
        return records

    def look(self, function: Callable[..., Any], config: Config, *, build: bool = True) -> list[Any]:
        """Build the trainer of `config` on cluster.workers ranks. Returns what `function(trainer)` gave on each.

        Without `build`, what `function(rank, meeting, spec)` gave.
        """
        from raytrain_hpc.driver.run_setup import prepare_run

        world = int(config.cluster.workers)
        spec = _spec(prepare_run(config, None, lambda line: None), world, self._generation + 1, None, None)
        return self.call(_look, world, spec, function) if build else self.call(function, world, spec)

    def call(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        """Run `function(rank, meeting, *arguments)` on ranks 0..world-1. Returns what each returned."""
        self._ensure(world)
        self._generation += 1
        return self._everywhere(function, world, *arguments)

    def _everywhere(self, function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
        from raytrain_hpc.distributed.rendezvous import Rendezvous

        meeting = Rendezvous("127.0.0.1", self._store.port, self._generation, 60.0)
        return self._call([partial(function, rank, meeting, *arguments) for rank in range(world)])

    def close(self) -> None:
        for process, connection in self._members:
            connection.close()
            process.kill()
            process.join()
        self._members = []

    def _publish(self, prepared: Any, batching: Any, records: list[list[dict[str, Any]]]) -> None:
        from raytrain_hpc.checkpoint.manifest import ShardReport

        shards: dict[int, list[ShardReport]] = {}
        for record in (record for of_rank in records for record in of_rank if record["type"] == "shard"):
            shards.setdefault(record["step"], []).append(ShardReport.from_json(record["shard"]))
        for step, reports in shards.items():
            prepared.store.publish(step, self._generation, reports, prepared.meta(batching)(step), lambda: None)

    def _ensure(self, world: int) -> None:
        from torch.distributed import TCPStore

        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        while len(self._members) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _call(self, jobs: list[Any]) -> list[list[dict[str, Any]]]:
        for (_, connection), job in zip(self._members, jobs, strict=False):
            connection.send(job)
        answers = []
        for _, connection in self._members[: len(jobs)]:
            if not connection.poll(self._timeout_s):
                self.close()
                raise RankFailed(f"no answer within {self._timeout_s:g} s")
            answers.append(connection.recv())
        failures = [answer for answer in answers if isinstance(answer, str)]
        if failures:
            self.close()  # the survivors may be left inside a broken group
            raise RankFailed("\n".join(failures))
        return answers


def _serve(connection: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a daemon may have no children
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from raytrain_hpc.distributed.process_groups import leave

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
            leave()


def spec_of(config: Config, world: int, *, steps_to: int) -> Any:
    """What the driver would hand to the ranks of a first generation that trains to `steps_to`."""
    from raytrain_hpc.driver.run_setup import prepare_run

    return _spec(prepare_run(config, None, lambda line: None), world, 1, None, steps_to)


def _spec(prepared: Any, world: int, generation: int, resume_step: int | None, steps_to: int | None) -> Any:
    from raytrain_hpc.runtime.worker_spec import WorkerSpec

    layout, batching = prepared.layout(world)
    return WorkerSpec(
        config=prepared.config,
        layout=layout,
        batching=batching,
        shape=prepared.shape,
        custom=prepared.custom,
        generation=generation,
        resume_step=resume_step,
        steps_to=prepared.config.train.steps if steps_to is None else steps_to,
        initial=prepared.initial,
    )


def _look(rank: int, meeting: Any, spec: Any, function: Callable[..., Any]) -> Any:
    import torch

    from raytrain_hpc.runtime.control_channel import Control
    from raytrain_hpc.training.builder import build_trainer

    return function(build_trainer(spec, rank, torch.device("cpu"), meeting, Control()))


def _train(rank: int, meeting: Any, spec: Any) -> list[dict[str, Any]]:
    import torch

    from raytrain_hpc.runtime.control_channel import Control
    from raytrain_hpc.training.builder import build_trainer

    control = Control()
    trainer = build_trainer(spec, rank, torch.device("cpu"), meeting, control)
    trainer.run(spec.first, spec.steps_to)
    return control.drain()


SMALL = [
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


def small(directory: Path | str | None = None, *words: str) -> Config:
    """A config small enough for tests: a tiny decoder on synthetic tokens, one thread, no extras."""
    directory = directory or tempfile.mkdtemp(prefix="run-")
    return load_config(None, [f"run.dir={directory}", *SMALL, *words])


def steps_of(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The metrics of the steps among a rank's records."""
    return [record["metrics"] for record in records if record["type"] == "step"]


__all__ = ["PRELOADED", "SMALL", "RankFailed", "WarmPool", "small", "spec_of", "steps_of"]
