"""All settings with their descriptions. The defaults are the quickstart.

`raytrain_hpc.config.loader.load_config` fills them from YAML files and `key=value` words. A key that is a Python
keyword is declared with a trailing underscore (`async_`) and written without it (`checkpoint.async`).
"""

from __future__ import annotations

from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, cast

from raytrain_hpc.config.cluster_config import ClusterConfig
from raytrain_hpc.config.fault_config import FaultConfig, FaultKind, InjectConfig
from raytrain_hpc.config.field import AUTO, Auto, Section, key
from raytrain_hpc.config.model import ModelConfig
from raytrain_hpc.config.training_config import (
    CallbackConfig,
    EvalConfig,
    LoraConfig,
    LrSchedulerConfig,
    OptimizerConfig,
    TrainConfig,
)

# Settings that the planner can choose: they also accept `auto`, or a list of candidate values.
PLANNABLE_KEYS = (
    *(f"parallel.{name}" for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero")),
    *(f"parallel.{name}" for name in ("pp_schedule", "activation_checkpointing", "recompute_layers")),
    *(f"parallel.{name}" for name in ("activation_offload", "offload")),
    "train.micro_batch_size",
)


@dataclass
class RunConfig(Section):
    """Name, directory and start of the run."""

    name: str = key("quickstart", "Name of the run; with a YAML file that sets none: the name of the file.")
    dir: str = key(
        AUTO,
        "Directory for all output of the run: a path visible to every node, or a URL (s3://, gs://, az://); auto: "
        "runs/NAME.",
    )
    seed: int = key(1337, "Seed of weights, data order and dropout.", minimum=0)
    resume: Literal["auto", "never"] = key(
        "auto", "auto: resume from the newest valid checkpoint in run.dir; never: refuse a run.dir that holds a run."
    )
    init_from: str = key(
        "",
        "Start from the weights and architecture of another run or an imported model, given by its directory; model "
        "keys override it. Step count, data order and optimizer state start fresh.",
    )
    deadline: str = key(
        AUTO,
        "Time before which the run saves and stops, with exit code 3. auto: the end of the Slurm or PBS job, if known; "
        "none; a duration from the start of the command (3h30m, 90m, 5400 for seconds); or a time (2026-12-31T18:00).",
    )


@dataclass
class SourceConfig(Section):
    """One dataset of a mixture."""

    path: str = key("", "Dataset directory.")
    weight: float = key(1.0, "Sampling weight, relative to the other sources.", minimum=0)


@dataclass
class StageConfig(Section):
    """New weights of a mixture from a given number of tokens onward."""

    from_tokens: int = key(0, "Number of tokens before these weights apply, rounded up to 1024 samples.", above=0)
    weights: list[float] = key([], "One weight per entry of data.sources.")


@dataclass
class DataConfig(Section):
    """The dataset, the order of its samples, and how they are read."""

    path: str = key(
        "stdlib",
        "Directory written by `raytrain-hpc prepare`, on disk or as a URI (s3://bucket/folder); or a built-in "
        "dataset. stdlib: source code of the Python standard library, as bytes; synthetic: random tokens.",
    )
    sources: list[SourceConfig] = key([], "Mixture of datasets instead of data.path: [{path: A, weight: 2}, ...].")
    order: Literal["shuffle", "sequential", "random"] = key(
        "shuffle",
        "shuffle: every sample once per epoch, in a new permutation each epoch; sequential: as stored; random: windows "
        "at random offsets, drawn with replacement.",
    )
    packing: Literal["stream", "documents", "padded"] = key(
        "stream",
        "stream: windows over the concatenated documents; documents: the same windows, with attention, positions and "
        "loss restricted to each document; padded: one document per sample, truncated or padded to seq_len.",
    )
    stages: list[StageConfig] = key([], "Later weights of data.sources: [{from_tokens: 1e9, weights: [1, 3]}, ...].")
    engine: Literal["auto", "ray", "local"] = key(
        AUTO,
        "Data loader; the tokens do not depend on it. ray: reader processes on the cluster's CPUs, through Ray Data; "
        "local: a thread per worker, from memory-mapped shards; auto: ray on a running cluster, else local.",
    )
    num_readers: int | Auto = key(
        AUTO,
        "Reader processes. Of engine=ray: one CPU each; auto: one per node, limited by free CPUs. Of a dataset of your "
        "own: per worker, of a stream at most 1; 0: none; auto: 2 with a GPU, else 0.",
        minimum=0,
    )
    bucket_steps: int = key(
        16,
        "For a dataset with lengths: number of steps whose samples are sorted by length and divided into microbatches.",
        minimum=1,
    )
    prefetch_steps: int = key(8, "Maximum number of steps to prefetch per worker.", minimum=1)
    prefetch_mib: int = key(256, "Memory for prefetched data in MiB: per worker, and of engine=ray.", minimum=1)
    local_cache: str = key(
        "", "Directory on every node's local disk: shards are copied there before training, verified and read there."
    )


@dataclass
class ParallelConfig(Section):
    """Sizes of the mesh axes (outermost first: pp, dp_replicate, dp_shard, cp, tp) and options of each dimension."""

    zero: int = key(
        0,
        "ZeRO stage. 0: replicate the state; 1: shard optimizer state; 2: and gradients; 3: and weights.",
        minimum=0,
    )
    dp_replicate: int | Auto = key(AUTO, "Data-parallel replicas of the state.", minimum=1)
    dp_shard: int | Auto = key(AUTO, "Ranks that shard the state; with dp_replicate above 1: HSDP.", minimum=1)
    tp: int = key(1, "Tensor-parallel ranks: split heads, channels, vocabulary and positions.", minimum=1)
    cp: int = key(1, "Context-parallel ranks: split the positions of every sequence.", minimum=1)
    ulysses: int = key(
        1, "Ranks of cp that exchange positions for heads (Ulysses); the remaining factor is ring attention.", minimum=1
    )
    pp: int = key(1, "Pipeline-parallel ranks: split the layers.", minimum=1)
    pp_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = key(
        "1f1b",
        "Pipeline schedule. gpipe: all forwards, then all backwards; 1f1b: alternate; interleaved_1f1b: with several "
        "stages per rank; interleaved_zero_bubble: also weight gradients in the bubbles; zbv: two stages in a V.",
    )
    pp_stages_per_rank: int | Auto = key(
        AUTO, "Stages per pipeline rank; auto: 2 for schedules with several, else 1.", minimum=1
    )
    ep: int = key(1, "Expert-parallel ranks.", minimum=1)
    reshard_over: int = key(
        0,
        "ZeRO-3: number of ranks, such as those of a node, that shard weights between forward and backward; 0: all.",
        minimum=0,
    )
    quantize: Literal["none", "weights", "gradients", "both"] = key(
        "none", "Blockwise quantization of ZeRO's communication: 8-bit weight gathers, 4-bit gradient reductions."
    )
    activation_checkpointing: Literal["none", "selective", "full"] = key(
        "none",
        "none: keep all activations; selective: keep matrix products and attention; full: keep the input of each "
        "block; auto: what costs least and fits into the device, in as many layers as that needs.",
    )
    recompute_layers: int = key(
        0,
        "Layers of each pipeline stage, the first ones, that activation_checkpointing applies to; 0: all; auto: as few "
        "as fit into the device, also if this is not set and activation_checkpointing=auto.",
        minimum=0,
    )
    activation_offload: Literal["none", "cpu"] = key(
        "none",
        "Place of the activations that blocks keep for the backward pass. none: the device; cpu: host memory, copied "
        "during the passes of other blocks.",
    )
    offload: Literal["none", "cpu", "disk"] = key(
        "none",
        "Place of the optimizer state. none: with the weights; cpu: host memory; disk: memory-mapped files in "
        "parallel.offload_dir with bounded resident memory. Offloaded state is updated by the CPU.",
    )
    offload_dir: str = key(
        "", "Directory on a local disk of each node for offload=disk; its unnamed files vanish with their process."
    )
    tile_mib: float = key(
        0.0,
        "Largest weight, in MiB of the compute type, that ZeRO-3 gathers at once; larger linear layers are gathered "
        "tile by tile; 0: no tiling.",
        minimum=0,
    )
    bucket_mib: int = key(25, "Gradient bucket size in MiB, with zero=0.", minimum=1)


@dataclass
class CheckpointConfig(Section):
    """Checkpoints in run.dir/checkpoints and in node-local storage, and in-memory snapshots."""

    interval: int | Auto = key(
        AUTO,
        "Steps between checkpoints; 0: only at the end and when stopped; auto: also every 10 minutes of training.",
        minimum=0,
    )
    keep: int = key(3, "Number of newest checkpoints to keep; 0: all.", minimum=0)
    async_: bool = key(True, "Write checkpoints in the background, overlapped with the next steps.")
    local_dir: str = key(
        "",
        "Directory on a disk (or in the memory, below /dev/shm) of each node: every checkpoint is written there, and "
        "only those of checkpoint.upload_interval to run.dir too; a run resumes from the newest. May begin with ~ or "
        "$VARIABLE, as they are on each node. Empty: none.",
    )
    upload_interval: int | Auto = key(
        AUTO,
        "With checkpoint.local_dir, steps between checkpoints in run.dir: a multiple of checkpoint.interval; auto: "
        "every checkpoint. Those at the end, at a stop, and that callbacks request or label are always in run.dir.",
        minimum=1,
    )
    local_keep: int = key(
        2, "Number of newest checkpoints to keep in checkpoint.local_dir while the next one is written.", minimum=1
    )
    snapshot_interval: int = key(
        1,
        "Steps between in-memory snapshots, from which surviving ranks continue after a failure; 0: none. If every "
        "rank holds the whole state, none is taken: the live state of a survivor suffices.",
        minimum=0,
    )
    replicate_snapshots: bool = key(
        True,
        "Replicate in-memory snapshots so that they survive the loss of a rank: asynchronously to another node if all "
        "copies are on one node or, on a single node, through shared memory.",
    )

    @property
    def publish_interval(self) -> int | Auto:
        """Steps between the checkpoints in run.dir: those of `interval`, or with a local tier of `upload_interval`."""
        return self.upload_interval if self.local_dir and self.upload_interval != AUTO else self.interval


@dataclass
class LoggingConfig(Section):
    """Console, metrics, experiment trackers and samples."""

    interval: int = key(10, "Steps between log lines.", minimum=1)
    verbose: bool = key(False, "Print the phases of each recovery too.")
    rank_stats_interval: int = key(
        10, "Steps between statistics over ranks of step times and memory; 0: none.", minimum=0
    )
    tensorboard: bool = key(True, "Write TensorBoard events to run.dir/tb.")
    ray_metrics: bool = key(
        True, "Export gauges to the Ray dashboard and Prometheus, on a Ray cluster that was running before the run."
    )
    wandb_project: str = key(
        "", "Weights & Biases project to log to; WANDB_MODE=offline keeps the data on this machine."
    )
    mlflow_uri: str = key("", "MLflow tracking URI to log to, such as http://HOST:5000 or sqlite:///mlflow.db.")
    trackers: list[str] = key([], "Experiment trackers that installed packages register, by name.")
    sample_tokens: int = key(200, "Length of the text sampled at the end, in tokens; 0: none.", minimum=0)
    prompts: list[str] = key(
        [], "Prompts for every checkpoint, sampled in the background to samples.jsonl and the console."
    )
    peak_tflops: float | Auto = key(AUTO, "Dense peak TFLOP/s per device, for MFU; auto: from its name.", above=0)
    pipeline_timeline_interval: int = key(
        0, "Steps between recorded pipeline timelines, as JSON and SVG in run.dir/timeline; 0: never.", minimum=0
    )


@dataclass
class ProfilerConfig(Section):
    """Profiler of some steps on some ranks."""

    name: Literal["none", "torch", "pyinstrument"] = key("none", "Profiler, writing to run.dir/profile.")
    ranks: list[int] = key([0], "Ranks to profile.")
    steps: list[int] = key([10, 15], "First step to profile, and the step at which profiling ends (exclusive).")


@dataclass
class Config(Section):
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LrSchedulerConfig = field(default_factory=LrSchedulerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)
    origins: dict[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Where each key was set ("conf/x.yaml:12", "command line", "load_config"). Keys with their default are missing."""
    auto_choices: dict[str, list[Any] | None] = field(default_factory=dict, repr=False, compare=False)
    """Keys that the config leaves to the planner, with the values to choose from, or None for `auto`.

    Until the planner has chosen, such a key holds its default or the first value of the list.
    """
    settings: tuple[Any, ...] = field(default=(), repr=False, compare=False)
    """The settings that `loader.build_config` was given, before presets and references were resolved."""

    def origin(self, key: str) -> str:
        """Return where a key was set ("conf/x.yaml:12", "command line", "load_config"), or "" for a default."""
        return self.origins.get(key, "")


# Name of each section -> its dataclass, in the order of config.yaml.
SECTIONS: dict[str, type[Section]] = {
    f.name: cast("type[Section]", f.default_factory)
    for f in fields(Config)
    if isinstance(f.default_factory, type) and issubclass(f.default_factory, Section)
}


def get_fields() -> dict[str, Field[Any]]:
    """Return the dataclass field of every key, such as "train.steps"."""
    return {f"{name}.{f.name.rstrip('_')}": f for name, section in SECTIONS.items() for f in fields(section)}


def get_default(key: str) -> Any:
    """Return the default of a key."""
    f = get_fields()[key]
    return f.default if f.default_factory is MISSING else f.default_factory()


def to_dict(config: object) -> Any:
    """Convert a config or a section to dicts and lists, with keys as written in YAML."""
    if isinstance(config, Config):
        return {name: to_dict(getattr(config, name)) for name in SECTIONS}
    if is_dataclass(config):
        return {f.name.rstrip("_"): to_dict(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, list):
        return [to_dict(item) for item in config]
    return config


__all__ = [
    "AUTO",
    "CallbackConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "FaultConfig",
    "FaultKind",
    "InjectConfig",
    "LoggingConfig",
    "LoraConfig",
    "LrSchedulerConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PLANNABLE_KEYS",
    "ParallelConfig",
    "ProfilerConfig",
    "RunConfig",
    "SECTIONS",
    "SourceConfig",
    "StageConfig",
    "TrainConfig",
    "get_default",
    "get_fields",
    "to_dict",
]
