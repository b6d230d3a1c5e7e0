"""All settings with their descriptions. The defaults are the quickstart.

`raytrain_hpc.config.loader.load_config` fills them from YAML files and `key=value` words. A key that is a Python
keyword is declared with a trailing underscore (`async_`) and written without it (`checkpoint.async`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from raytrain_hpc.config.field import AUTO, key
from raytrain_hpc.config.model import ModelConfig

# Settings that the planner can choose: they also accept `auto`, or a list of candidate values.
PLANNABLE_KEYS = (
    *(f"parallel.{name}" for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero")),
    *(f"parallel.{name}" for name in ("schedule", "recompute", "offload")),
    "train.micro_batch",
)


@dataclass
class RunConfig:
    """Name, directory and start of the run."""

    name: str = key("quickstart", "Name of the run; with a YAML file that sets none: the name of the file.")
    dir: str = key("runs/${run.name}", "Directory for all output of the run. Must be visible to every node.")
    seed: int = key(1337, "Seed of weights, data order and dropout.", minimum=0)
    resume: Literal["auto", "never"] = key(
        "auto", "auto: resume from the newest valid checkpoint in run.dir; never: refuse a run.dir that holds a run."
    )
    init_from: str = key(
        "",
        "Start from the weights and architecture of another run or an imported model, given by its directory; model "
        "keys override it. Step count, data order and optimizer state start fresh.",
    )


@dataclass
class SourceConfig:
    """One dataset of a mixture."""

    path: str = key("", "Dataset directory.")
    weight: float = key(1.0, "Sampling weight, relative to the other sources.", minimum=0)


@dataclass
class StageConfig:
    """New weights of a mixture from a given number of tokens onward."""

    from_tokens: int = key(0, "Number of tokens before these weights apply, rounded up to 1024 samples.", above=0)
    weights: list[float] = key([], "One weight per entry of data.sources.")


@dataclass
class DataConfig:
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
    readers: int | str = key(
        AUTO, "Reader processes of engine=ray, one CPU each; auto: one per node, limited by free CPUs.", minimum=1
    )
    ahead_steps: int = key(8, "Maximum number of steps to prefetch per worker.", minimum=1)
    ahead_mib: int = key(256, "Memory for prefetched data in MiB: per worker, and of engine=ray.", minimum=1)
    preload: str = key(
        "", "Directory on every node's local disk: shards are copied there before training, verified and read there."
    )


@dataclass
class TrainConfig:
    """Batches, optimizer, learning rate, precision and evaluation."""

    steps: int = key(150, "Number of optimizer steps.", minimum=0)
    seq_len: int = key(128, "Tokens per sequence.", minimum=1)
    global_batch: int = key(32, "Sequences per step, over all workers.", minimum=1)
    micro_batch: int | str = key(
        AUTO,
        "Sequences per forward pass; must divide global_batch. auto: the largest that gives every data-parallel rank "
        "work. The number of microbatches per step, global_batch/micro_batch, is fixed for the lifetime of a run.",
        minimum=1,
    )
    optimizer: Literal["adamw", "sgd"] = key("adamw", "adamw: AdamW with decoupled weight decay; sgd: plain SGD.")
    lr: float = key(3e-3, "Peak learning rate.", above=0)
    min_lr: float | str = key(AUTO, "Learning rate at the end of the schedule; auto: a tenth of lr.", minimum=0)
    schedule: Literal["cosine", "wsd", "constant"] = key(
        "cosine",
        "Learning rate after the warmup. cosine: decay to min_lr; wsd: constant, then linear decay to min_lr; "
        "constant: stay at lr.",
    )
    warmup: int = key(15, "Steps of linear warmup.", minimum=0)
    decay_fraction: float = key(0.2, "Fraction of the steps in the final decay, with schedule=wsd.", minimum=0)
    beta1: float = key(0.9, "Decay rate of AdamW's first moment.", minimum=0)
    beta2: float = key(0.95, "Decay rate of AdamW's second moment.", minimum=0)
    eps: float = key(1e-8, "Epsilon of AdamW.", above=0)
    weight_decay: float = key(0.1, "Weight decay of parameters with two or more dimensions.", minimum=0)
    grad_clip: float = key(1.0, "Maximum global gradient norm; 0: no clipping.", minimum=0)
    lr_scaling: Literal["none", "sqrt", "linear"] = key(
        "none", "Scaling of lr with the batch. linear: times global_batch / lr_base_batch; sqrt: times its square root."
    )
    lr_base_batch: int = key(0, "Global batch for which lr was tuned; required by lr_scaling.", minimum=0)
    dtype: Literal["fp32", "bf16", "fp64"] = key(
        "fp32", "Compute type. bf16 keeps weights, optimizer state and gradient reduction in fp32."
    )
    deterministic: bool | str = key(
        False,
        "true: deterministic kernels, so that a layout gives the same bits in every run; elastic: also a fixed order "
        "of sums over microbatches, so that every data-parallel degree and ZeRO stage gives the same bits.",
    )
    lora_rank: int = key(0, "LoRA: train only low-rank adapters of this rank; 0: train all weights.", minimum=0)
    lora_alpha: float = key(16.0, "LoRA: adapter outputs are scaled by lora_alpha / lora_rank.", above=0)
    lora_targets: list[str] = key(
        ["qkv", "out", "gate", "up", "down"], "LoRA: linear layers with adapters, among these."
    )
    compile: bool = key(False, "Apply torch.compile to each block and the loss.")
    eval_every: int = key(0, "Steps between evaluations; 0: only at the end.", minimum=0)
    eval_samples: int = key(512, "Validation windows per evaluation, spread over the split; 0: all.", minimum=0)


@dataclass
class ParallelConfig:
    """Sizes of the mesh axes (outermost first: pp, dp_replicate, dp_shard, cp, tp) and options of each dimension."""

    zero: int = key(
        0,
        "ZeRO stage. 0: replicate the state; 1: shard optimizer state; 2: and gradients; 3: and weights.",
        minimum=0,
    )
    dp_replicate: int | str = key(AUTO, "Data-parallel replicas of the state.", minimum=1)
    dp_shard: int | str = key(AUTO, "Ranks that shard the state; with dp_replicate above 1: HSDP.", minimum=1)
    tp: int = key(1, "Tensor-parallel ranks: split heads, channels, vocabulary and positions.", minimum=1)
    cp: int = key(1, "Context-parallel ranks: split the positions of every sequence.", minimum=1)
    ulysses: int = key(
        1, "Ranks of cp that exchange positions for heads (Ulysses); the remaining factor is ring attention.", minimum=1
    )
    pp: int = key(1, "Pipeline-parallel ranks: split the layers.", minimum=1)
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = key(
        "1f1b",
        "Pipeline schedule. gpipe: all forwards, then all backwards; 1f1b: alternate; interleaved_1f1b: with several "
        "stages per rank; interleaved_zero_bubble: also weight gradients in the bubbles; zbv: two stages in a V.",
    )
    virtual_stages: int | str = key(
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
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "Activation checkpointing. none: keep all activations; selective: keep matrix products and attention; full: "
        "keep the input of each block.",
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
class ClusterConfig:
    """The Ray cluster, and number, devices and placement of the workers."""

    address: str = key(
        AUTO,
        "Ray cluster as host:port. auto: RAY_ADDRESS or a cluster on this machine, else start Ray; local: start Ray.",
    )
    workers: int | str = key(
        AUTO,
        "Number of workers, each a Ray actor; auto: every GPU, or 2 on CPU; 0: train in this process.",
        minimum=0,
    )
    threads: int = key(1, "CPU threads per worker.", minimum=1)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "Device type; auto: cuda if the cluster has GPUs, else cpu.")
    interface: str = key(AUTO, "Network interface for collectives; auto: the one with the node's Ray address.")
    start_timeout: float = key(120.0, "Seconds within which all workers must start.", above=0)
    min_workers: int | str = key(
        AUTO, "Fewest workers to continue on while failed ones are replaced; auto: one model replica.", minimum=1
    )
    rack_label: str = key(
        "rack",
        "Label of Ray nodes (ray start --labels rack=...) with their rack or switch. Workers that communicate most are "
        "placed on the same rack.",
    )
    spares: int = key(0, "Additional warm workers, ready to replace failed ones.", minimum=0)


@dataclass
class CheckpointConfig:
    """Checkpoints in run.dir/checkpoints, and in-memory snapshots."""

    every: int = key(0, "Steps between checkpoints; 0: only at the end and when stopped.", minimum=0)
    keep: int = key(3, "Number of newest checkpoints to keep; 0: all.", minimum=0)
    async_: bool = key(True, "Write checkpoints in the background, overlapped with the next steps.")
    snapshot_every: int = key(
        1,
        "Steps between in-memory snapshots, from which surviving ranks continue after a failure; 0: none. If every "
        "rank holds the whole state, none is taken: the live state of a survivor suffices.",
        minimum=0,
    )
    buddies: bool = key(
        True,
        "Replicate in-memory snapshots so that they survive the loss of a rank: asynchronously to another node if all "
        "copies are on one node or, on a single node, through shared memory.",
    )


FaultKind = Literal[
    "kill",
    "stop",
    "hang",
    "gil",
    "exception",
    "skip_collective",
    "swap_collectives",
    "nan",
    "spike",
    "bitflip",
    "slow",
    "node",
]


@dataclass
class InjectConfig:
    """A fault to inject."""

    kind: FaultKind = key(
        "kill",
        "kill: SIGKILL; stop: SIGSTOP; hang: infinite loop; gil: hold the interpreter lock forever; exception: raise; "
        "skip_collective: skip one all-reduce; swap_collectives: reorder two of them; nan: a NaN gradient; spike: a "
        "loss 100 times too high; bitflip: flip a bit of a weight after the step; slow: microbatches take three times "
        "as long from then on; node: kill all Ray processes of the rank's node, which must not be the driver's.",
    )
    rank: int = key(0, "Rank that it hits, modulo the world size.", minimum=0)
    step: int = key(1, "Step of the fault. It is injected once, even if the step is repeated.", minimum=1)


@dataclass
class FaultConfig:
    """Detection of failures, and reactions to them."""

    stall_timeout: float | str = key(
        AUTO,
        "Seconds without progress after which a worker counts as failed; auto: nearly 3 steps, at least 0.8 s.",
        above=0,
    )
    max_failures: int = key(
        3, "Failures in a row, without a step beyond the furthest one, that a run survives.", minimum=0
    )
    on_nan: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "Reaction to a non-finite step or a loss spike that persists when recomputed, at most max_failures in a row. "
        "stop: end the run; skip: discard the update; rollback: restore the newest checkpoint and continue with the "
        "next batch.",
    )
    spike_deviations: float = key(
        0.0,
        "A loss this many standard deviations above the mean of the last 128 steps is a spike; 0: off. 6 is typical.",
        minimum=0,
    )
    compare_every: int = key(
        100,
        "Steps between bitwise comparisons of replicas, also made before every checkpoint; 0: never. A rank that "
        "differs from the majority is replaced; the run restores the state of keep_agreed or the newest checkpoint.",
        minimum=0,
    )
    on_straggler: Literal["warn", "evict", "rebalance"] = key(
        "warn",
        "Reaction to a slow rank. warn: record an incident; evict: also replace it; rebalance: give it fewer "
        "microbatches (data parallelism only). CPU workers only, so far.",
    )
    straggler_factor: float = key(
        2.0, "A rank is slow if its compute time per step exceeds the others' median by this factor.", above=1
    )
    keep_agreed: bool = key(False, "Keep the last state that replicas agreed on in host memory, for compare_every.")
    inject: list[InjectConfig] = key([], "Faults to inject, for tests: [{kind: kill, rank: 1, step: 10}, ...].")


@dataclass
class ObserveConfig:
    """Logging, metrics, experiment trackers, samples and profiling."""

    log_every: int = key(10, "Steps between log lines.", minimum=1)
    ranks_every: int = key(10, "Steps between statistics over ranks of step times and memory; 0: none.", minimum=0)
    tensorboard: bool = key(True, "Write TensorBoard events to run.dir/tb.")
    ray_metrics: bool = key(
        True, "Export gauges to the Ray dashboard and Prometheus, on a Ray cluster that was running before the run."
    )
    wandb: str = key("", "Weights & Biases project to log to; WANDB_MODE=offline keeps the data on this machine.")
    mlflow: str = key("", "MLflow tracking URI to log to, such as http://HOST:5000 or sqlite:///mlflow.db.")
    sample_tokens: int = key(200, "Length of the text sampled at the end, in tokens; 0: none.", minimum=0)
    prompts: list[str] = key(
        [], "Prompts for every checkpoint, sampled in the background to samples.jsonl and the console."
    )
    peak_tflops: float | str = key(AUTO, "Dense peak TFLOP/s per device, for MFU; auto: from its name.", above=0)
    timeline_every: int = key(
        0, "Steps between recorded pipeline timelines, as JSON and SVG in run.dir/timeline; 0: never.", minimum=0
    )
    profile: Literal["none", "torch", "pyinstrument"] = key("none", "Profiler, writing to run.dir/profile.")
    profile_ranks: list[int] = key([0], "Ranks to profile.")
    profile_steps: list[int] = key([10, 15], "First step to profile, and the step at which profiling ends (exclusive).")


@dataclass
class Config:
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)

    def origin(self, key: str) -> str:
        """Return where a key was set ("conf/x.yaml:12", "command line"), or "" for a default."""
        origins: dict[str, str] = self.__dict__.get("_origins", {})
        return origins.get(key, "")

    @property
    def auto_choices(self) -> dict[str, list[Any] | None]:
        """Keys that the config leaves to the planner, with the values to choose from, or None for `auto`.

        Until the planner has chosen, such a key holds its default or the first value of the list.
        """
        choices: dict[str, list[Any] | None] = self.__dict__.get("_auto_choices", {})
        return choices


def to_dict(config: object) -> Any:
    """Convert a config or a section to dicts and lists, with keys as written in YAML."""
    if is_dataclass(config):
        return {f.name.rstrip("_"): to_dict(getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, list):
        return [to_dict(item) for item in config]
    return config


__all__ = [
    "AUTO",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "FaultConfig",
    "FaultKind",
    "InjectConfig",
    "ModelConfig",
    "ObserveConfig",
    "PLANNABLE_KEYS",
    "ParallelConfig",
    "RunConfig",
    "SourceConfig",
    "StageConfig",
    "TrainConfig",
    "to_dict",
]
