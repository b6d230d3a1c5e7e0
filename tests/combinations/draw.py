"""Random combinations of features, drawn from a seed.

A combination is a training job, which one process runs as the reference, and two executions of it: the first trains the
first half of the steps and saves, the second resumes. What belongs to an execution must not change the losses.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from raytrain_hpc.config.schema import Config
from tests.warm_pool import make_small_config

Item = TypeVar("Item")
Options = Mapping[str, tuple[str, ...]]

STEPS = 6
GPT2 = ("model.norm=layernorm", "model.activation=gelu", "model.position_embedding=learned", "model.bias=true")
LLAMA = ("model.norm=rmsnorm", "model.activation=swiglu", "model.position_embedding=rotary", "model.bias=false")
MODELS: Options = {
    "GPT-2": GPT2,
    "Llama, grouped queries": (*LLAMA, "model.num_kv_heads=2", "model.tie_embeddings=false"),
    "Qwen3, scaled rotary positions": (*LLAMA, "model.head_dim=12", "model.qk_norm=true", "model.rope_factor=2"),
    "mixture of experts": (*LLAMA, "model.num_experts=5", "model.shared_expert_size=23"),
    "mixture of experts, bias": (*GPT2, "model.num_experts=4", "model.load_balancing=bias"),
}
TRAINING: Mapping[str, Options] = {
    "sizes": {"even": (), "odd": ("model.vocab_size=65", "model.ffn_size=50", "train.seq_len=15")},
    "dropout": {"": (), "dropout": ("model.dropout=0.1",)},
    "data": {"": (), "documents": ("data.packing=documents",), "padded": ("data.packing=padded",)},
    "optimizer": {
        "AdamW": (),
        "Muon": ("optimizer.name=muon",),
        "SGD": ("optimizer.name=sgd", "optimizer.lr=0.1"),
        "optimizer class": ("optimizer.name=torch.optim.NAdam",),
        "parameter groups": (
            'optimizer.groups=[{pattern: "*norm*", weight_decay: 0}, {pattern: "embedding*", lr_factor: 0}]',
        ),
    },
    "LoRA": {"": (), "LoRA": ("lora.rank=3",)},
    "weight averaging": {"": (), "weight averaging": ("train.callbacks=[{name: ema, args: {decay: 0.9}}]",)},
}
EXECUTION: Mapping[str, Options] = {
    "recomputation": {
        "": (),
        "selective recomputation": ("parallel.activation_checkpointing=selective",),
        "full recomputation": ("parallel.activation_checkpointing=full",),
        "recomputation in one layer": ("parallel.activation_checkpointing=full", "parallel.recompute_layers=1"),
    },
    "activations": {"": (), "activation offload": ("parallel.activation_offload=cpu",)},
    "compile": {"": (), " ": (), "  ": (), "compile": ("train.compile=true",)},
    "determinism": {
        "": (),
        "deterministic": ("train.deterministic=true",),
        "elastic": ("train.deterministic=elastic",),
    },
    "offload": {"": (), "offload": ("parallel.offload=cpu",), "offload to disk": ("parallel.offload=disk",)},
    "loss": {"": (), "loss in chunks": ("train.loss_chunks=3",)},
    "buckets": {"": (), "small buckets": ("parallel.bucket_mib=1",)},
    "state": {"": (), "verified state": ("fault.keep_verified_state=true", "fault.replica_check_interval=1")},
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
MAX_RANKS = 8


@dataclass(frozen=True)
class Execution:
    """How the ranks of a job run it: features, and the settings that they stand for."""

    features: tuple[str, ...]
    words: tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """A training job and its executions, each for a part of the steps."""

    features: tuple[str, ...]
    words: tuple[str, ...]
    executions: tuple[Execution, Execution]

    @property
    def all_features(self) -> tuple[frozenset[str], ...]:
        """The features of each execution, with those of the job."""
        return tuple(frozenset((*self.features, *execution.features)) for execution in self.executions)


def draw_combination(seed: int, number: int) -> Combination:
    """Return the combination of this number. It depends on nothing but the arguments."""
    generator = random.Random(f"{seed}/{number}")
    model = generator.choice(list(MODELS))
    features, words = [model], [*MODELS[model]]
    for options in TRAINING.values():
        _add(features, words, options, _choose(generator, list(options)))
    layers, microbatch = generator.choice((4, 5)), generator.choice((1, 2, 3))
    # One sequence per microbatch is needed where a schedule wants a multiple of the pipeline ranks.
    words += [f"model.num_layers={layers}", "train.global_batch_size=12", f"train.micro_batch_size={microbatch}"]
    executions = [_draw_execution(generator, model, 12 // microbatch) for _ in range(2)]
    return Combination(tuple(features), tuple(words), (executions[0], executions[1]))


def make_reference_config(combination: Combination, dataset: str) -> Config:
    """Return the config of the job on one process. `dataset`: a directory with tokenized documents."""
    return _make_config((f"data.path={dataset}", *combination.words), ("cluster.workers=1",))


def make_config(combination: Combination, execution: Execution, directory: str, dataset: str) -> Config:
    """Return the config of the job with an execution. Raises ConfigError or LayoutError if it is refused."""
    offload_dir = [f"parallel.offload_dir={directory}"] * ("offload to disk" in execution.features)
    words = (f"run.dir={directory}", f"data.path={dataset}", *combination.words)
    return _make_config(words, (*execution.words, *offload_dir))


def _make_config(words: Sequence[str], execution: Sequence[str]) -> Config:
    base = ["train.dtype=fp32", f"train.steps={STEPS}", "eval.interval=3", "train.max_grad_norm=0.5"]
    return make_small_config(None, *base, *words, *execution)


def _draw_execution(generator: random.Random, model: str, num_microbatches: int) -> Execution:
    """Draw an execution. Sizes are drawn so that most are legal; what else is refused counts as refused."""
    features: list[str] = []
    words: list[str] = []
    tp, cp, pp = _draw_model_parallel_sizes(generator)
    dp = generator.choice([size for size in (1, 2, 2, 3, 4) if size * tp * cp * pp <= MAX_RANKS])
    dp = min(dp, num_microbatches)
    for name, size in (("tensor parallel", tp), ("context parallel", cp), ("pipeline", pp)):
        features += [name] * (size > 1)
    words += [f"parallel.tp={tp}", f"parallel.cp={cp}", f"parallel.pp={pp}", f"cluster.workers={tp * cp * pp * dp}"]
    if cp > 1 and generator.random() < 0.5:
        features.append("Ulysses")
        words.append("parallel.ulysses=2")
    if pp > 1:
        schedule = generator.choice(SCHEDULES)
        features.append(schedule)
        words.append(f"parallel.pp_schedule={schedule}")
    _add_data_parallelism(generator, dp, features, words)
    if "experts" in model and (sizes := [size for size in (2, 4) if dp * cp % size == 0]):
        size = generator.choice([1, *sizes])
        features += ["expert parallel"] * (size > 1)
        words.append(f"parallel.ep={size}")
    for options in EXECUTION.values():
        _add(features, words, options, _choose(generator, list(options)))
    return Execution(tuple(features), tuple(words))


def _draw_model_parallel_sizes(generator: random.Random) -> tuple[int, int, int]:
    while True:
        tp, cp, pp = (generator.choice((1, 1, 2)) for _ in range(3))
        if tp * cp * pp <= MAX_RANKS // 2:
            return tp, cp, pp


def _add_data_parallelism(generator: random.Random, dp: int, features: list[str], words: list[str]) -> None:
    zero = generator.randrange(4)
    words.append(f"parallel.zero={zero}")
    if dp == 1:
        return
    if zero == 0:
        features.append("replicas")
        return
    features.append(f"ZeRO-{zero}")
    if dp == 4 and generator.random() < 0.5:
        features.append("HSDP")
        words += ["parallel.dp_replicate=2", "parallel.dp_shard=2"]
    elif zero == 3 and dp == 4 and generator.random() < 0.5:
        features.append("hierarchical partitioning")
        words.append("parallel.reshard_over=2")
    if zero == 3 and generator.random() < 0.3:
        features.append("tiles")
        words.append("parallel.tile_mib=0.008")


def _choose(generator: random.Random, options: Sequence[Item]) -> Item:
    """Return the first option, the default, half of the time."""
    return options[0] if generator.random() < 0.5 else generator.choice(options)


def _add(features: list[str], words: list[str], options: Options, choice: str) -> None:
    features += [choice] if choice.strip() and choice not in ("even", "AdamW") else []
    words += options[choice]
