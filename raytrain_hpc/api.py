"""Python API of a run: load_config, plan, train, run_script, start, and the Run handle that start returns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from raytrain_hpc.config.loader import complete_config, copy_config, load_config
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.stop_signals import STOP_NOTICE, stop_on_signals
from raytrain_hpc.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from raytrain_hpc.callbacks.callback import Callback, DriverCallback
    from raytrain_hpc.data.samples.sample_dataset import CollateFunction
    from raytrain_hpc.driver.result import Result
    from raytrain_hpc.driver.run_directory import RunDirectory
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.runtime.worker_spec import CustomModel, LossFunction, ModelFactory


class TrainArguments(TypedDict, total=False):
    """The keyword arguments of `train` that say what is trained."""

    model: ModelFactory | None
    loss: LossFunction | None
    plan: Mapping[str, str] | Literal["auto"] | None
    dataset: Any
    val_dataset: Any
    collate_fn: CollateFunction | None
    lengths: Any
    callbacks: Sequence[Callback | DriverCallback]
    lr_schedule: Callable[[int], float] | None


def check_train_arguments(config: Config, arguments: TrainArguments) -> None:
    """Raise what `train` raises for arguments that do not fit together or to the config. Trains nothing."""
    parts: dict[str, Any] = {**arguments}
    callbacks, lr_schedule = parts.pop("callbacks", ()), parts.pop("lr_schedule", None)
    names = ("model", "loss", "plan", "dataset", "val_dataset", "collate_fn", "lengths")
    custom = _build_custom_model(config, **{**dict.fromkeys(names), **parts})
    _build_supervisor(config, custom, callbacks, lr_schedule, True, threading.Event())


def train(
    config: Config,
    *,
    model: ModelFactory | None = None,
    loss: LossFunction | None = None,
    plan: Mapping[str, str] | Literal["auto"] | None = None,
    dataset: Any = None,
    val_dataset: Any = None,
    collate_fn: CollateFunction | None = None,
    lengths: Any = None,
    callbacks: Sequence[Callback | DriverCallback] = (),
    lr_schedule: Callable[[int], float] | None = None,
    quiet: bool = False,
) -> Result:
    """Train to completion and return the result. Ctrl-C and SIGTERM save and stop after the current step.

    Args:
        config: Settings of the run, from `load_config`.
        model: Factory of a custom model: `model(config)` returns an `nn.Module` that takes int64 tokens [b, t].
            Without it, the built-in decoder is trained.
        loss: `loss(output, targets)` returns a scalar: the *sum* of the losses over the valid targets [b, t].
            Required with `model`. With `dataset`: `loss(model, batch)` returns the sum of the losses over the samples
            of a batch, or (sum, count); the count is the number of samples otherwise.
        plan: How to shard the model: module path, with `*` as a wildcard, to style. block: a unit of ZeRO, activation
            checkpointing and compilation (default: the members of the largest list of modules). colwise, rowwise,
            sequence, replicate and the other styles of transformers' `base_model_tp_plan`: tensor parallelism. "auto":
            the plan that a transformers model has itself.
        dataset: Training data with `__len__` and `__getitem__`, such as a torch Dataset, a Hugging Face dataset or an
            array, instead of the token shards of `data.path`. Every sample is read once per epoch, in an order that no
            number of workers changes. Or a stream: an iterable of samples, a DataLoader of batches, a function
            (rank, world_size) that returns either, or a Ray Data dataset; see docs/own_data.md for their guarantees.
        val_dataset: Validation data in any of these forms, or a mapping from names to several.
        collate_fn: Forms a batch of a list of samples; default: torch's `default_collate`.
        lengths: Length of each training sample, to put samples of similar length into one microbatch.
        callbacks: Instances of `Callback`, which run on every rank, and of `DriverCallback`; in addition to those of
            `train.callbacks`.
        lr_schedule: `lr_schedule(step)` returns the factor of `optimizer.lr` for optimizer step `step` (0-based). It
            replaces `lr_scheduler.name`, must be a pure function of the step, and is sent to every worker.
        quiet: Print nothing.

    Raises a subclass of RaytrainError with a one-line message.
    """
    stop, config = threading.Event(), copy_config(config)
    custom = _build_custom_model(config, model, loss, plan, dataset, val_dataset, collate_fn, lengths)
    supervisor = _build_supervisor(config, custom, callbacks, lr_schedule, quiet, stop)
    with stop_on_signals(stop, "" if quiet else STOP_NOTICE):
        return supervisor.run()


def run_script(
    config: Config,
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    callbacks: Sequence[Callback | DriverCallback] = (),
    quiet: bool = False,
) -> Result:
    """Run a training script that calls `attach` on the workers of this config, to completion.

    Every worker runs the script from its beginning, and again after a failure; see `attach`. `callbacks`: as of
    `train`. Raises as `train`.
    """
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.observability.console import Console
    from raytrain_hpc.runtime.worker_spec import Script

    config = copy_config(config)
    complete_config(config)
    path = Path(script).expanduser().absolute()
    if not path.is_file():
        raise ConfigError("SCRIPT", str(script), "run", "no such file; give the path of a Python script")
    stop = threading.Event()
    supervisor = Supervisor(config, Script(str(path), tuple(arguments)), Console(quiet=quiet), stop, callbacks)
    with stop_on_signals(stop, "" if quiet else STOP_NOTICE):
        return supervisor.run()


def start(
    config: Config,
    *,
    model: ModelFactory | None = None,
    loss: LossFunction | None = None,
    plan: Mapping[str, str] | Literal["auto"] | None = None,
    dataset: Any = None,
    val_dataset: Any = None,
    collate_fn: CollateFunction | None = None,
    lengths: Any = None,
    callbacks: Sequence[Callback | DriverCallback] = (),
    lr_schedule: Callable[[int], float] | None = None,
    quiet: bool = True,
) -> Run:
    """Start a training run in a background thread and return a handle to it.

    Arguments as of `train`, datasets and streams included. Later changes of `config` and of the working directory have
    no effect on the run.
    """
    from raytrain_hpc.driver.run_setup import make_paths_absolute

    stop, config = threading.Event(), copy_config(config)
    complete_config(config)
    config = make_paths_absolute(config)
    custom = _build_custom_model(config, model, loss, plan, dataset, val_dataset, collate_fn, lengths)
    supervisor = _build_supervisor(config, custom, callbacks, lr_schedule, quiet, stop)
    return Run(config.run.dir, supervisor.run, stop, supervisor.resize)


class Run:
    """Handle to a training run in the background, returned by `start`."""

    def __init__(
        self,
        run_dir: str,
        target: Callable[[], Result],
        stop: threading.Event,
        resize: Callable[[int | Literal["auto"]], None],
    ):
        self._run_dir, self._stop, self._resize = run_dir, stop, resize  # absolute
        self._result: Result | None = None
        self._error: BaseException | None = None
        # An event instead of Thread.join: a join interrupted by Ctrl-C marks a running thread as ended.
        self._finished = threading.Event()
        threading.Thread(target=self._run, args=(target,), name="raytrain-run", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether the run has not ended yet."""
        return not self._finished.is_set()

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of the committed steps so far, one dict per step with the keys of metrics.jsonl."""
        return self._open_directory().read_valid_metrics()

    def resize(self, workers: int | Literal["auto"]) -> None:
        """Continue with another number of workers, from the first step boundary after they are up. Does not block.

        With cluster.workers=auto, the run keeps this number until it is resized to "auto", which follows the cluster
        again. The split of the batch into microbatches does not change, so neither does the loss curve. Raises
        ConfigError if `workers` is below cluster.min_workers or above cluster.max_workers.
        """
        self._resize(workers)

    def stop(self) -> None:
        """Request to save and stop after the current step. Does not block."""
        self._stop.set()

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the run to end and return its result, or raise the error that ended it.

        Raises TimeoutError if the run has not ended after `timeout` seconds.
        """
        if not self._finished.wait(timeout):
            raise TimeoutError(f"the run in {self._run_dir} is still running after {timeout} s")
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise RuntimeError("the run ended without a result")
        return self._result

    def watch(self, every_s: float = 1.0) -> None:
        """Show live metrics and the loss curve in a notebook until the run ends, updated every `every_s` seconds.

        Interrupting the kernel stops the live display; the run continues, and `stop` and `resize` still work. Outside
        of a notebook, the lines that the run prints are all there is.
        """
        try:
            handle = _start_display(self)
            while self.running:
                self._finished.wait(every_s)
                if handle is not None:
                    handle.update(self)
        except KeyboardInterrupt:
            return

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook displays for this run."""
        from raytrain_hpc.run_report.notebook import render_live_html

        state = "failed" if self._error is not None else "stopping" if self._stop.is_set() else "running"
        return render_live_html(self._open_directory(), state if self._result is None else self._result.outcome)

    def _open_directory(self) -> RunDirectory:
        """Return the directory that the driver, which is in this process, writes."""
        from raytrain_hpc.driver.run_directory import RunDirectory
        from raytrain_hpc.storage.location import parse_location

        return RunDirectory(parse_location(self._run_dir))

    def _run(self, target: Callable[[], Result]) -> None:
        try:
            self._result = target()
        except BaseException as error:  # raised again by `result`
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
    """Find all legal layouts on a cluster, best first, and estimate memory, step time and goodput of the best one.

    Loads neither torch nor, unless `running`, Ray. Settings with a value are kept. The plan chooses settings that are
    `auto` or a list and, on accelerators, parallel axes that are not set. Raises LayoutError if no layout is legal.

    Args:
        workers: Number of devices, instead of `nodes` and `gpus_per_node`. Accelerators are 8 per node if divisible.
            The default is the minimum that the settings allow.
        nodes: Number of nodes.
        gpus_per_node: Devices per node.
        device: Name in planner.hardware, with overrides ("h100,memory_gib=64"); h100 for nodes, GPUs or bf16, else cpu.
        inside: Links inside a node. The default is the measurement of `bench comm` for the device, else its usual link.
        across: Links between nodes; default as for `inside`.
        running: Plan for the running Ray cluster, which is inspected.
        tokens: Token budget. The default is that of train.steps.
        device_hours: Mean device hours between failures of one device; see planner.goodput.
        restart_s: Seconds to restart all workers from a checkpoint.
        pause_s: Seconds until the surviving ranks continue from memory.
    """
    from raytrain_hpc.planner.cluster_shape import build_cluster
    from raytrain_hpc.planner.measured_links import load_calibration
    from raytrain_hpc.planner.plan import make_plan

    _complete_plannable(config)
    plan_cluster = partial(
        make_plan, config, tokens=tokens, device_hours=device_hours, restart_s=restart_s, pause_s=pause_s
    )
    if running:
        from raytrain_hpc.driver.cluster_probe import inspect_running_cluster

        running_cluster = inspect_running_cluster(config)
        return plan_cluster(running_cluster, load_calibration(running_cluster.device.name))
    cluster = build_cluster(
        config,
        workers=workers,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        device=device,
        inside=inside,
        across=across,
    )
    return plan_cluster(cluster, load_calibration(cluster.device.name))


def _complete_plannable(config: Config) -> None:
    """Complete a config. Raises ConfigError for a model that the planner does not know."""
    complete_config(config)
    if config.model.hf:
        remedy = "the plan knows the built-in decoder only; leave the key out and give its sizes instead"
        raise ConfigError("model.hf", config.model.hf, config.origin("model.hf"), remedy)


def _build_custom_model(
    config: Config,
    model: ModelFactory | None,
    loss: LossFunction | None,
    plan: Mapping[str, str] | Literal["auto"] | None,
    dataset: Any,
    val_dataset: Any,
    collate_fn: CollateFunction | None,
    lengths: Any,
) -> CustomModel | None:
    """Return the user's parts, or None for the built-in decoder on tokens. Raises ModelError if one is missing."""
    from raytrain_hpc.data.samples.dataset_settings import fit_settings
    from raytrain_hpc.data.samples.sample_dataset import make_sample_dataset
    from raytrain_hpc.planner.module_plan_styles import OWN_PLAN, check_plan
    from raytrain_hpc.runtime.worker_spec import CustomModel

    styles = {OWN_PLAN: OWN_PLAN} if isinstance(plan, str) else plan
    check_plan(styles or {})
    if config.model.hf and model is None:
        if any(part is not None for part in (loss, dataset, val_dataset, collate_fn, lengths)):
            raise ModelError("model.hf trains on token shards with its own loss; pass model=... for parts of your own")
        return _build_transformers_model(config, styles)
    if (model is None) != (loss is None):
        raise ModelError("model and loss must be given together: pass both, or neither to train the built-in decoder")
    if model is None or loss is None:
        if any(part is not None for part in (plan, dataset, val_dataset, collate_fn, lengths)):
            raise ModelError(
                "plan, dataset, val_dataset, collate_fn and lengths are for a model of your own: the built-in decoder "
                "trains on token shards; pass model and loss too"
            )
        return None
    if dataset is None:
        if any(part is not None for part in (val_dataset, collate_fn, lengths)):
            raise ModelError("val_dataset, collate_fn and lengths belong to a dataset; pass dataset too")
        return CustomModel(model, loss, styles)
    if not config.origin("train.seq_len"):
        config.train.seq_len = 1  # throughput counts samples
    samples = make_sample_dataset(dataset, val_dataset, collate_fn, lengths)
    fit_settings(config, samples)
    return CustomModel(model, loss, styles, dataset=samples)


def _build_transformers_model(config: Config, plan: Mapping[str, str] | None) -> CustomModel:
    """Return the model of `model.hf`, sharded by `plan` or its own."""
    from raytrain_hpc.model.transformers_model import compute_loss_sum, make_factory, read_hf_config, run_causal_lm
    from raytrain_hpc.planner.module_plan_styles import OWN_PLAN
    from raytrain_hpc.runtime.worker_spec import CustomModel

    hf_config = read_hf_config(config)
    plan = plan or {OWN_PLAN: OWN_PLAN}
    return CustomModel(make_factory(config), compute_loss_sum, plan, run=run_causal_lm, hf_config=hf_config)


def _build_supervisor(
    config: Config,
    custom: CustomModel | None,
    callbacks: Sequence[Callback | DriverCallback],
    lr_schedule: Callable[[int], float] | None,
    quiet: bool,
    stop: threading.Event,
) -> Supervisor:
    from raytrain_hpc.driver.supervisor import Supervisor
    from raytrain_hpc.observability.console import Console

    complete_config(config)
    return Supervisor(config, custom, Console(quiet=quiet), stop, callbacks, lr_schedule)


__all__ = ["Run", "load_config", "plan", "run_script", "start", "train"]


def _start_display(run: Run) -> Any:
    """Display a run in the notebook of this process, and return a handle with which to update it; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython.display import display

    return display(run, display_id=True)  # type: ignore[no-untyped-call]
