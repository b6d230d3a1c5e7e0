"""Warm-up of the workers that are ready but are no members of the generation that runs: spares, and replacements."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import ray
from ray.exceptions import RayError

from raytrain_hpc.driver.ray_messages import describe_actor_death
from raytrain_hpc.runtime.worker_spec import WorkerSpec

_log = logging.getLogger(__name__)
_MAX_DEATHS = 3  # of processes during warm-ups, after which no more are warmed up


@dataclass
class WarmupState:
    """How warm the process of a worker is.

    `call`: the reference of its unfinished warm-up call, of `generation`. `program`: what its last call has compiled,
    or will have, see `SpareWarmup.begin_generation`. `has_run`: it was a member of a generation.
    """

    call: Any = None
    generation: int = 0
    program: Any = None
    has_run: bool = False

    @property
    def is_cold(self) -> bool:
        """Whether other ranks would wait for it in their first step, or for the end of its warm-up."""
        return self.call is not None or (self.program is None and not self.has_run)


class WarmableWorker(Protocol):
    """A worker whose process can be warmed up."""

    @property
    def actor(self) -> Any:
        """The Ray actor, with the methods `warm_up` and `cancel_warmup`."""

    @property
    def warmup(self) -> WarmupState:
        """How warm its process is."""


W = TypeVar("W", bound=WarmableWorker)


class SpareWarmup:
    """Executor of warm-ups. A worker is warmed up again if the generation that runs needs other compiled code.

    A warm-up that fails is reported once; the worker is then used as it is. After a few deaths no more are started.
    """

    def __init__(self) -> None:
        self._spec_ref: Any = None
        self._program: Any = None
        self._generation = 0
        self._num_deaths = 0
        self._reasons: set[str] = set()

    def begin_generation(self, spec: WorkerSpec, spec_ref: Any) -> None:
        """Warm up for this generation from now on. Compiled code does not depend on the number of replicas."""
        self._spec_ref, self._generation = spec_ref, spec.generation
        self._program = replace(spec.layout, dp_replicate=1), spec.batching.size, spec.config.parallel

    def update(self, spares: Iterable[W]) -> list[W]:
        """Note which warm-ups have ended, start those that are due, and return the workers whose process has died.

        Call while a generation runs, with all ready workers that are no members. Does not block.
        """
        dead = []
        for worker in spares:
            state = worker.warmup
            if state.call is not None:
                if ray.wait([state.call], timeout=0)[0] and not self._finish(state):
                    dead.append(worker)
            elif state.program != self._program and self._num_deaths < _MAX_DEATHS:
                state.call = worker.actor.warm_up.remote(self._spec_ref)
                state.generation, state.program = self._generation, self._program
        return dead

    def begin_run(self, members: Iterable[WarmableWorker]) -> None:
        """Cut the warm-ups of workers that become members short: their run calls wait for them."""
        for worker in members:
            state = worker.warmup
            if state.call is not None:
                worker.actor.cancel_warmup.remote(state.generation)
                state.call, state.program = None, None
            state.has_run = True

    def record_death(self, worker: WarmableWorker) -> None:
        """Note that the process of a worker has ended, maybe because of its warm-up."""
        if worker.warmup.call is not None:
            worker.warmup.call = None
            self._num_deaths += 1

    def _finish(self, state: WarmupState) -> bool:
        """Read the result of a warm-up that has ended. Return whether the process is alive."""
        is_alive = True
        try:
            reason = ray.get(state.call)
        except RayError as error:
            is_alive, reason = False, describe_actor_death(error)
            self._num_deaths += 1
        if reason and reason not in self._reasons:
            self._reasons.add(reason)
            _log.warning("the warm-up of a spare failed, so its first step may have to compile: %s", reason)
        state.call = None
        return is_alive
