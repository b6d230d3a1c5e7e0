"""The Python API: load_config, plan, train, start, prepare, generate."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from raytrain_hpc.config import Config
from raytrain_hpc.config_files import load_config
from raytrain_hpc.errors import ModelError

if TYPE_CHECKING:
    from raytrain_hpc.driver.result import Result
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.worker.task import LossFunction, ModelFactory


def train(
    config: Config,
    *,
    model: ModelFactory | None = None,
    loss: LossFunction | None = None,
    quiet: bool = False,
) -> Result:
    """Run a training to its end in this call. Ctrl-C and SIGTERM save and stop after the current step.

    `model(config)` gives your own `nn.Module` (int64 tokens [b, t] in) and `loss(output, targets)` the *sum* of its
    losses over the valid targets [b, t] as a scalar; without them the platform's decoder trains. RaytrainErrors are
    raised with all that a user should know in one line.
    """
    stop = threading.Event()
    supervisor = _supervisor(config, model, loss, quiet, stop)
    with _stop_on_signals(stop):
        return supervisor.run()


def start(
    config: Config,
    *,
    model: ModelFactory | None = None,
    loss: LossFunction | None = None,
    quiet: bool = True,
) -> Run:
    """Run a training behind this call and give a handle on it: `metrics()`, `resize()`, `stop()`, `result()`."""
    stop = threading.Event()
    supervisor = _supervisor(config, model, loss, quiet, stop)
    return Run(config, supervisor.run, stop, supervisor.resize)


class Run:
    """A training that goes on in the background."""

    def __init__(
        self, config: Config, target: Callable[[], Result], stop: threading.Event, resize: Callable[[int], None]
    ):
        self._config, self._stop, self._resize = config, stop, resize
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(target,), name="raytrain-run", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the training still goes on."""
        return self._thread.is_alive()

    def metrics(self) -> list[dict[str, Any]]:
        """The committed steps so far, one dict each with the keys of metrics.jsonl, in step order."""
        from raytrain_hpc.driver.rundir import RunDirectory

        lines = RunDirectory(Path(self._config.run.dir)).committed_metrics()
        last = {line["step"]: line for line in lines}
        return [last[step] for step in sorted(last)]

    def resize(self, workers: int) -> None:
        """Go on with this many workers from a step boundary on, as soon as they are up; returns at once.

        The batch stays cut as it is, so the curve is the same. Raises ConfigError for fewer than cluster.min_workers.
        """
        self._resize(workers)

    def stop(self) -> None:
        """Save and stop after the current step; returns at once."""
        self._stop.set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end and return the result, or raise what ended the run. TimeoutError after `timeout` seconds."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the run in {self._config.run.dir} goes on after {timeout} s")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise RuntimeError("the run ended without a result")
        return self._result

    def _run(self, target: Callable[[], Result]) -> None:
        try:
            self._result = target()
        except BaseException as error:  # handed to whoever asks for the result
            self._error = error


def plan(
    config: Config,
    *,
    workers: int | None = None,
    device_hours: float = 50_000.0,
    restart_s: float = 300.0,
    pause_s: float = 2.0,
) -> dict[str, Any]:
    """Layout, microbatches, bytes and FLOPs a worker, from the settings alone. Loads neither torch nor Ray.

    What failures cost follows from `device_hours` (one device fails once in so many), `restart_s` (of everything, from
    a checkpoint) and `pause_s` (where those that are left go on in memory); see plan.goodput.
    """
    from raytrain_hpc.plan.flops import CAUSAL_CONVENTION, flops_per_token
    from raytrain_hpc.plan.goodput import COPY_BYTES_PER_S, goodput
    from raytrain_hpc.plan.layout import check_shape, least_world, resolve_batching, resolve_layout
    from raytrain_hpc.plan.memory import parameters_of_rank, state_bytes
    from raytrain_hpc.shape import resolve_shape

    world = workers or least_world(config)
    layout = resolve_layout(config, world)
    batching = resolve_batching(config, layout)
    vocab = 256 if config.model.vocab_size == "auto" else None
    shape = resolve_shape(config.model, vocab_size=vocab, seq_len=config.train.seq_len)
    check_shape(config, shape)
    own, train = parameters_of_rank(shape, layout, config.train.seq_len), config.train
    state = state_bytes(own, layout, train.dtype, train.optimizer, config.parallel.offload)
    save_s = state / COPY_BYTES_PER_S
    expected = goodput(world, save_s=save_s, restart_s=restart_s, pause_s=pause_s, device_hours=device_hours)
    return {
        "workers": world,
        "layout": asdict(layout),
        "microbatches": asdict(batching),
        "microbatches_per_rank": [len(share) for share in batching.shares(layout.data_parallel)],
        "parameters": shape.num_parameters(),
        "state_bytes_per_rank": state,
        "flops_per_token": flops_per_token(shape, config.train.seq_len),
        "flops_convention": CAUSAL_CONVENTION,
        "failures": {"device_hours": device_hours, "restart_s": restart_s, "pause_s": pause_s, **asdict(expected)},
    }


def _supervisor(
    config: Config, model: ModelFactory | None, loss: LossFunction | None, quiet: bool, stop: threading.Event
) -> Supervisor:
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.observe.console import Console
    from raytrain_hpc.worker.spec import CustomModel

    if (model is None) != (loss is None):
        raise ModelError("model and loss go together: give both, or neither for the platform's decoder")
    custom = None if model is None or loss is None else CustomModel(model, loss)
    return Supervisor(config, custom, Console(quiet=quiet), stop)


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for an orderly stop, the second ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


__all__ = ["Run", "load_config", "plan", "start", "train"]
