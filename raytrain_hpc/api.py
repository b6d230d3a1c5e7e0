"""The Python API: load_config, plan, train, start, prepare, generate."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from raytrain_hpc.driver.result import Result
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.runtime.worker_spec import LossFunction, ModelFactory


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
    supervisor = _build_supervisor(config, model, loss, quiet, stop)
    with _stop_on_signals(stop):
        return supervisor.run()


def run_script(config: Config, script: str | Path, arguments: Sequence[str] = (), *, quiet: bool = False) -> Result:
    """Run a script with a loop of its own, which asks for it with `attach`, on the workers of this config, to its end.

    Every worker runs the script from its beginning, and again after a fault; see `attach`. Raises as `train`.
    """
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.observability.console import Console
    from raytrain_hpc.runtime.worker_spec import Script

    path = Path(script).expanduser().absolute()
    if not path.is_file():
        raise ConfigError("SCRIPT", str(script), "run", "no such file; give the path of a Python script")
    stop = threading.Event()
    supervisor = Supervisor(config, Script(str(path), tuple(arguments)), Console(quiet=quiet), stop)
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
    supervisor = _build_supervisor(config, model, loss, quiet, stop)
    return Run(config, supervisor.run, stop, supervisor.resize)


class Run:
    """A training that goes on in the background."""

    def __init__(
        self, config: Config, target: Callable[[], Result], stop: threading.Event, resize: Callable[[int], None]
    ):
        self._config, self._stop, self._resize = config, stop, resize
        self._result: Result | None = None
        self._error: BaseException | None = None
        # Waited for instead of the thread: a Thread.join that Ctrl-C interrupts takes a running thread for ended.
        self._finished = threading.Event()
        threading.Thread(target=self._run, args=(target,), name="raytrain-run", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether the training still goes on."""
        return not self._finished.is_set()

    def metrics(self) -> list[dict[str, Any]]:
        """The committed steps so far, one dict each with the keys of metrics.jsonl, in step order."""
        from raytrain_hpc.driver.run_directory import RunDirectory

        lines = RunDirectory(Path(self._config.run.dir)).read_metrics()
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
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the run in {self._config.run.dir} goes on after {timeout} s")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise RuntimeError("the run ended without a result")
        return self._result

    def watch(self, every_s: float = 1.0) -> None:
        """In a notebook: show figures and curve, live, until the run ends. Interrupting the kernel ends the showing
        alone: the run goes on, and `stop` or `resize` still reach it."""
        from IPython.display import display

        shown: Any = display(self, display_id=True)  # type: ignore[no-untyped-call]
        try:
            while self.running:
                self._finished.wait(every_s)
                shown.update(self)
        except KeyboardInterrupt:
            return

    def _repr_html_(self) -> str:
        """What a notebook shows of it."""
        from raytrain_hpc.run_report.notebook import render_live_html

        outcome = "failed" if self._error is not None else "stopping" if self._stop.is_set() else "under way"
        return render_live_html(self._config.run.dir, outcome if self._result is None else self._result.outcome)

    def _run(self, target: Callable[[], Result]) -> None:
        try:
            self._result = target()
        except BaseException as error:  # handed to whoever asks for the result
            self._error = error
        finally:
            self._finished.set()


def plan(
    config: Config,
    *,
    workers: int | None = None,
    nodes: int | None = None,
    gpus_per_node: int | None = None,
    device: str | None = None,
    inside: str = "",
    across: str = "",
    running: bool = False,
    tokens: float | None = None,
    device_hours: float = 50_000.0,
    restart_s: float = 300.0,
    pause_s: float = 2.0,
) -> dict[str, Any]:
    """All legal layouts on a cluster, best first, and what to expect of the best. Loads neither torch nor Ray.

    The cluster is `nodes` of `gpus_per_node` devices with the names that plan.hardware knows (and numbers that differ:
    "h100,memory_gib=64"), or `workers` devices,
    eight a node where that divides them. Without a `device` they are H100 where nodes, GPUs or train.dtype=bf16 are
    given, else CPUs. What the settings fix is kept; what they leave to `auto`, to a list or, on accelerators, say
    nothing of is chosen. `running`: for the cluster that is running, which is asked. Links that are not named are those
    that `bench comm` has measured between such devices, else those they most often have. `tokens`: the budget; without
    it that of train.steps. What failures cost follows from `device_hours` (one device fails once in so many),
    `restart_s` (of everything, from a checkpoint) and `pause_s`
    (where those that are left go on in memory); see plan.goodput. Raises LayoutError where no layout is legal.
    """
    from raytrain_hpc.planner.hardware import get_preset_name, make_machine
    from raytrain_hpc.planner.layout import get_min_world_size
    from raytrain_hpc.planner.measured_links import load_calibration, load_links
    from raytrain_hpc.planner.plan import make_plan

    calibrated = partial(
        make_plan, config, tokens=tokens, device_hours=device_hours, restart_s=restart_s, pause_s=pause_s
    )
    if running:
        from raytrain_hpc.driver.cluster_probe import inspect_running_cluster

        there = inspect_running_cluster(config)
        return calibrated(there, load_calibration(there.device.name))
    wants_gpus = nodes or gpus_per_node or config.cluster.device == "cuda" or config.train.dtype == "bf16"
    named = device or ("h100" if wants_gpus and config.cluster.device != "cpu" else "cpu")
    if nodes is None and gpus_per_node is None:
        world = workers or get_min_world_size(config)
        gpus_per_node = 8 if named != "cpu" and world % 8 == 0 else world
        nodes = world // gpus_per_node
    nodes, gpus_per_node = nodes or 1, gpus_per_node or 8
    if workers not in (None, nodes * gpus_per_node):
        remedy = f"{nodes} nodes of {gpus_per_node} devices are {nodes * gpus_per_node}; leave one of them out"
        raise ConfigError("workers", workers, "plan", remedy)
    cluster = make_machine(named, nodes, gpus_per_node, inside, across, load_links(get_preset_name(named)))
    return calibrated(cluster, load_calibration(get_preset_name(named)))


def _build_supervisor(
    config: Config, model: ModelFactory | None, loss: LossFunction | None, quiet: bool, stop: threading.Event
) -> Supervisor:
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.observability.console import Console
    from raytrain_hpc.runtime.worker_spec import CustomModel

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


__all__ = ["Run", "load_config", "plan", "run_script", "start", "train"]
