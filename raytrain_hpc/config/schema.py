"""Every setting, documented where it is declared. The defaults are the quickstart.

`raytrain_hpc.config.loader.load_config` fills these from YAML files and `key=value` words. A key whose name is a Python
keyword is declared with a trailing underscore (`async_`) and written without it (`checkpoint.async`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from raytrain_hpc.config.field import AUTO, key
from raytrain_hpc.config.model import ModelConfig

# What the planner can choose: these keys also take `auto`, or a list of values to choose from.
PLANNABLE_KEYS = (
    *(f"parallel.{name}" for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "ep", "zero")),
    *(f"parallel.{name}" for name in ("schedule", "recompute", "offload")),
    "train.micro_batch",
)


@dataclass
class RunConfig:
    """The run: where it lives and how it starts."""

    name: str = key("quickstart", "Name of the run; a YAML file's own name where it sets none.")
    dir: str = key("runs/${run.name}", "Everything the run writes. Must be visible to every node.")
    seed: int = key(1337, "Seed of weights, data order and dropout.", minimum=0)
    resume: Literal["auto", "never"] = key(
        "auto", "auto: go on from the newest valid checkpoint in run.dir; never: refuse a run.dir that holds a run."
    )
    init_from: str = key(
        "",
        "A run directory, or what `import-hf` wrote: its newest checkpoint gives the first weights, its model is the "
        "model, but for keys given beside it; steps, data and optimizer begin anew.",
    )


@dataclass
class SourceConfig:
    """One part of a mixture."""

    path: str = key("", "Dataset directory.")
    weight: float = key(1.0, "Share of the samples, relative to the other sources.", minimum=0)


@dataclass
class StageConfig:
    """Other weights from some point of the training on."""

    from_tokens: int = key(0, "Tokens read before these weights hold, rounded up to a block of 1024 samples.", above=0)
    weights: list[float] = key([], "A weight for each of data.sources.")


@dataclass
class DataConfig:
    """What is read, and in which order."""

    path: str = key(
        "stdlib",
        "A directory written by `raytrain-hpc prepare`, on disk or as a URI (s3://bucket/folder); or a built-in: "
        "stdlib (source text of the Python standard library, as bytes) or synthetic (random tokens).",
    )
    sources: list[SourceConfig] = key([], "A mixture instead of data.path: [{path: A, weight: 2}, ...].")
    order: Literal["shuffle", "sequential", "random"] = key(
        "shuffle",
        "shuffle: every sample once an epoch, another permutation each epoch; sequential: as stored; random: windows "
        "drawn with replacement at any offset.",
    )
    packing: Literal["stream", "documents", "padded"] = key(
        "stream",
        "stream: windows over all documents as one stream; documents: the same windows, but attention, positions and "
        "loss stay inside each document; padded: a document a sample, cut or padded to seq_len.",
    )
    stages: list[StageConfig] = key([], "Later weights of data.sources: [{from_tokens: 1e9, weights: [1, 3]}, ...].")
    engine: Literal["auto", "ray", "local"] = key(
        AUTO,
        "Who reads for the workers, the same bytes either way. ray: readers on the cluster's CPUs, through Ray Data; "
        "local: a thread of the worker, from memory-mapped shards; auto: ray on a cluster that was named or found.",
    )
    readers: int | str = key(
        AUTO, "engine=ray: reader processes, a CPU each; auto: one a node, as far as CPUs are free.", minimum=1
    )
    ahead_steps: int = key(8, "Steps that a worker reads ahead of the one in training, at most.", minimum=1)
    ahead_mib: int = key(256, "Memory for what was read ahead: of each worker, and of engine=ray.", minimum=1)
    preload: str = key(
        "", "A directory on every node's own disk: shards are copied there before training, verified, and read there."
    )


@dataclass
class TrainConfig:
    """The optimisation."""

    steps: int = key(150, "Optimizer steps.", minimum=0)
    seq_len: int = key(128, "Tokens a sequence.", minimum=1)
    global_batch: int = key(32, "Sequences a step, over all workers.", minimum=1)
    micro_batch: int | str = key(
        AUTO,
        "Sequences a forward pass; must divide global_batch. auto: the largest that gives every data-parallel rank "
        "work. global_batch/micro_batch logical microbatches stay the same for the whole life of a run.",
        minimum=1,
    )
    optimizer: Literal["adamw", "sgd"] = key("adamw", "AdamW with decoupled weight decay, or plain SGD.")
    lr: float = key(3e-3, "Peak learning rate.", above=0)
    min_lr: float | str = key(AUTO, "Learning rate at the end of the schedule; auto: a tenth of lr.", minimum=0)
    schedule: Literal["cosine", "wsd", "constant"] = key(
        "cosine", "After the warmup: cosine to min_lr; wsd: stay at lr, then linear to min_lr; constant: stay at lr."
    )
    warmup: int = key(15, "Steps of linear warmup.", minimum=0)
    decay_fraction: float = key(0.2, "wsd: share of the steps that the final decay takes.", minimum=0)
    beta1: float = key(0.9, "AdamW's first moment.", minimum=0)
    beta2: float = key(0.95, "AdamW's second moment.", minimum=0)
    eps: float = key(1e-8, "AdamW's epsilon.", above=0)
    weight_decay: float = key(0.1, "Weight decay, on parameters with two dimensions or more.", minimum=0)
    grad_clip: float = key(1.0, "Clip the global gradient norm to this; 0: never.", minimum=0)
    lr_scaling: Literal["none", "sqrt", "linear"] = key(
        "none", "Multiply lr by (global_batch / lr_base_batch), its square root, or not at all."
    )
    lr_base_batch: int = key(0, "The global batch at which lr was tuned; needed by lr_scaling.", minimum=0)
    dtype: Literal["fp32", "bf16", "fp64"] = key(
        "fp32", "Compute type. bf16 keeps fp32 weights, optimizer and gradient reduction."
    )
    deterministic: bool | str = key(
        False,
        "true: deterministic kernels only, so that the same layout gives the same bits; elastic: also one order of all "
        "sums over microbatches, so that every data-parallel degree and ZeRO stage gives the same bits.",
    )
    lora_rank: int = key(
        0,
        "Train low-rank adapters of this rank beside linear layers, and nothing else (LoRA); 0: all weights.",
        minimum=0,
    )
    lora_alpha: float = key(16.0, "Adapters count lora_alpha / lora_rank times.", above=0)
    lora_targets: list[str] = key(
        ["qkv", "out", "gate", "up", "down"], "Linear layers of a block that have adapters, of these."
    )
    compile: bool = key(False, "torch.compile each block and the loss.")
    eval_every: int = key(0, "Steps between evaluations; 0: only at the end.", minimum=0)
    eval_samples: int = key(512, "Validation windows an evaluation reads, spread over the split; 0: all.", minimum=0)


@dataclass
class ParallelConfig:
    """The mesh axes, outermost first: pp, dp_replicate, dp_shard, cp, tp."""

    zero: int = key(
        0, "ZeRO stage: 0 replicates the state; 1 shards the optimizer; 2 gradients too; 3 weights too.", minimum=0
    )
    dp_replicate: int | str = key(AUTO, "Data-parallel replicas of the state.", minimum=1)
    dp_shard: int | str = key(AUTO, "Ranks that the state is sharded over; both above 1 is HSDP.", minimum=1)
    tp: int = key(1, "Tensor-parallel ranks: each has some heads, channels and tokens, and some positions.", minimum=1)
    cp: int = key(1, "Context-parallel ranks: each has some positions of every sequence.", minimum=1)
    ulysses: int = key(
        1, "Ranks of cp that exchange positions for heads; the rest of cp is a ring that passes keys around.", minimum=1
    )
    pp: int = key(1, "Pipeline ranks: each has some of the layers.", minimum=1)
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"] = key(
        "1f1b",
        "Order of the pipeline's passes: all forwards, then all backwards; one of each in turn; the same with several "
        "stages a rank; gradients of weights in the gaps; two stages a rank, there and back, with hardly a gap.",
    )
    virtual_stages: int | str = key(AUTO, "Stages a pipeline rank; auto: 2 where a schedule knows several.", minimum=1)
    ep: int = key(1, "Expert-parallel ranks.", minimum=1)
    reshard_over: int = key(
        0,
        "ZeRO-3: ranks over which weights stay sharded between forward and backward, as those of a node; 0: all.",
        minimum=0,
    )
    quantize: Literal["none", "weights", "gradients", "both"] = key(
        "none", "What ZeRO sends in blocks of few bits: weights it gathers in 8, gradients it reduces in 4."
    )
    recompute: Literal["none", "selective", "full"] = key(
        "none", "Activations kept for backward: all; matrix products and attention only; each block's input only."
    )
    offload: Literal["none", "cpu", "disk"] = key(
        "none",
        "Where the optimizer's state lives: with the weights; in host memory; in memory-mapped files under "
        "parallel.offload_dir, of which a bounded part is resident. The CPU steps what is offloaded.",
    )
    offload_dir: str = key(
        "", "Directory on a disk of each node for offload=disk; the files have no names and end with their process."
    )
    tile_mib: float = key(
        0.0,
        "Largest weight, in MiB of its compute type, that ZeRO-3 gathers at once; larger linear layers are gathered "
        "tile by tile; 0: never tile.",
        minimum=0,
    )
    bucket_mib: int = key(25, "Size of a gradient bucket in plain data parallel.", minimum=1)


@dataclass
class ClusterConfig:
    """The workers and where they run."""

    address: str = key(
        AUTO, "Ray cluster: auto uses RAY_ADDRESS or a cluster running on this machine, else starts Ray; or host:port."
    )
    workers: int | str = key(
        AUTO, "One Ray actor each; auto: every GPU, or 2 on CPU. 0: one rank in this process, with no Ray.", minimum=0
    )
    threads: int = key(1, "CPU threads a worker computes with.", minimum=1)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where the cluster has GPUs, else cpu.")
    interface: str = key(AUTO, "Network interface of the collectives; auto: the one with the node's Ray address.")
    start_timeout: float = key(120.0, "Seconds until all workers must be up.", above=0)
    min_workers: int | str = key(
        AUTO, "Fewest workers to go on with when some are lost, until others come; auto: one model's.", minimum=1
    )
    rack_label: str = key(
        "rack",
        "Label of Ray's nodes (ray start --labels rack=...) that names the rack or switch each hangs on: workers that "
        "send much to one another are placed on the same one.",
    )
    spares: int = key(0, "Workers beyond those that train, up and waiting to take a lost one's place.", minimum=0)


@dataclass
class CheckpointConfig:
    """Checkpoints in run.dir/checkpoints."""

    every: int = key(0, "Steps between checkpoints; 0: only at the end and when stopped.", minimum=0)
    keep: int = key(3, "Newest checkpoints kept; 0: all.", minimum=0)
    async_: bool = key(True, "Write behind the next steps; false: the step waits for the disk.")
    snapshot_every: int = key(
        1,
        "Steps between snapshots in memory, from which the others go on when a worker is lost; 0: none. Where every "
        "rank holds the whole state, none is taken: the live one of those that are left serves.",
        minimum=0,
    )
    buddies: bool = key(
        True,
        "Have snapshots outlive the ranks that hold them: copied, behind the steps, into the memory of a rank on "
        "another node, where all that hold one are on one node; where there is but one, in memory that another rank "
        "has open.",
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
    """A fault on purpose."""

    kind: FaultKind = key(
        "kill",
        "kill: SIGKILL; stop: SIGSTOP; hang: an endless loop; gil: the interpreter's lock held for ever; exception; "
        "skip_collective: one all-reduce left out; swap_collectives: two of them in the other order; nan: a gradient "
        "that is no number; spike: a loss a hundred times too high; bitflip: a bit of a weight after the step; slow: "
        "from then on microbatches take three times as long; node: all that Ray runs on the rank's node is killed, "
        "which must not be the driver's.",
    )
    rank: int = key(0, "Which rank it hits; of fewer ranks, that number modulo how many there are.", minimum=0)
    step: int = key(1, "In which step; once, though the step is run again.", minimum=1)


@dataclass
class FaultConfig:
    """What happens when something breaks."""

    stall_timeout: float | str = key(
        AUTO,
        "Seconds without a sign of progress before a worker is given up on; auto: nearly 3 steps, and at least 0.8 s.",
        above=0,
    )
    max_failures: int = key(3, "Failures without a new step between them before the run gives up.", minimum=0)
    on_nan: Literal["stop", "skip", "rollback"] = key(
        "stop",
        "A step whose numbers are not finite, or a loss spike, also when computed again: end the run; go on without "
        "its update; or go on behind it with the state of the newest checkpoint. At most max_failures in a row.",
    )
    spike_deviations: float = key(
        0.0,
        "A loss that is this many standard deviations above the mean of the last 128 steps' is a spike; 0: none is. 6 "
        "is usual.",
        minimum=0,
    )
    compare_every: int = key(
        100,
        "Steps between comparisons of replicas, bit by bit, also before every checkpoint; 0: never. Whoever differs "
        "from most is replaced, and the run goes back to the newest checkpoint, or to what keep_agreed keeps.",
        minimum=0,
    )
    on_straggler: Literal["warn", "evict", "rebalance"] = key(
        "warn",
        "A rank that keeps the others waiting: an incident; or it is replaced, too; or it is given fewer microbatches, "
        "where passes need no other ranks. Seen on CPU workers; on a GPU, waiting is not told from working yet.",
    )
    straggler_factor: float = key(
        2.0, "How many times as long as the others' median a rank must work for a step to be called slow.", above=1
    )
    keep_agreed: bool = key(False, "Keep the state on which replicas last agreed in host memory, to go back to.")
    inject: list[InjectConfig] = key([], "Faults on purpose: [{kind: kill, rank: 1, step: 10}, ...].")


@dataclass
class ObserveConfig:
    """What the run says of itself."""

    log_every: int = key(10, "Steps between step lines.", minimum=1)
    ranks_every: int = key(
        10, "Steps between statistics over ranks: their times, waiting and memory; 0: none.", minimum=0
    )
    tensorboard: bool = key(True, "Write run.dir/tb.")
    ray_metrics: bool = key(True, "Gauges for the Ray dashboard and Prometheus, where the workers are Ray actors.")
    wandb: str = key("", "Weights & Biases project that metrics also go to; WANDB_MODE=offline keeps them here.")
    mlflow: str = key("", "MLflow tracking URI that metrics also go to, as http://HOST:5000 or sqlite:///mlflow.db.")
    sample_tokens: int = key(200, "Length of the text sampled at the end; 0: none.", minimum=0)
    prompts: list[str] = key(
        [], "What checkpoints are asked, beside the run: answers go to samples.jsonl, and lines to the console."
    )
    peak_tflops: float | str = key(AUTO, "Dense peak of a device, for MFU; auto: from its name.", above=0)
    timeline_every: int = key(
        0, "Steps between timelines of the pipeline, as JSON and picture in run.dir/timeline; 0: never.", minimum=0
    )
    profile: Literal["none", "torch", "pyinstrument"] = key("none", "Profiler, into run.dir/profile.")
    profile_ranks: list[int] = key([0], "Ranks that are profiled.")
    profile_steps: list[int] = key([10, 15], "First step profiled, and the step before which it ends.")


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
        """Where a key was set ("conf/x.yaml:12", "command line"), or "" for a default."""
        origins: dict[str, str] = self.__dict__.get("_origins", {})
        return origins.get(key, "")

    @property
    def auto_choices(self) -> dict[str, list[Any] | None]:
        """Keys that were left to the planner in so many words: a list to choose from, or None for `auto`.

        Until it has chosen, such a key holds its default, or the first of the list.
        """
        found: dict[str, list[Any] | None] = self.__dict__.get("_auto_choices", {})
        return found


def to_dict(config: object) -> Any:
    """A config (or a section) as dicts and lists, with the keys as a user writes them."""
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
