"""Settings of training: sections `train`, `optimizer`, `lr_scheduler`, `eval` and `lora` of the config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raytrain_hpc.config.field import AUTO, Auto, Section, key

OPTIMIZER_NAMES = ("adamw", "sgd", "muon")  # all other names are paths of classes
# Largest decay rate of a moment in bf16, which has 8 significant bits: with a larger one, the decrease of a step would
# be rounded away.
MAX_BF16_DECAY = 1 - 2.0**-8


def computes_in_bf16(dtype: str) -> bool:
    """Return whether a `train.dtype` has weights in fp32 and all products in bf16, or in float8 those that can be."""
    return dtype in ("bf16", "float8")


@dataclass
class CallbackConfig(Section):
    """A callback."""

    shorthand = "name"
    name: str = key("", "Name of the callback, or its class as MODULE:NAME.")
    args: dict[str, Any] = key({}, "Arguments of its class.")


@dataclass
class TrainConfig(Section):
    """Length of training, batches and precision."""

    steps: int = key(150, "Number of optimizer steps.", minimum=0)
    seq_len: int = key(128, "Tokens per sequence.", minimum=1)
    global_batch_size: int = key(32, "Sequences per step, over all workers.", minimum=1)
    micro_batch_size: int | Auto = key(
        AUTO,
        "Sequences per forward pass; must divide global_batch_size. auto: the largest that gives every data-parallel "
        "rank work. The number of microbatches per step, global_batch_size / micro_batch_size, is fixed for the "
        "lifetime of a run.",
        minimum=1,
    )
    dtype: Literal["auto", "fp32", "bf16", "float8", "fp64"] = key(
        AUTO,
        "Compute type. bf16 keeps weights, optimizer state and gradient reduction in fp32; float8: bf16, but the "
        "products of the built-in decoder's qkv, out, gate, up and down in float8 with one scale per tensor, on GPUs "
        "from compute capability 8.9 on; auto: bf16 on accelerators that have it, else fp32. A run keeps the type that "
        "it started with.",
    )
    float8_head: bool = key(False, "With dtype=float8: also the product of the output head.")
    deterministic: bool | Literal["elastic"] = key(
        False,
        "true: deterministic kernels, so that a layout gives the same bits in every run; elastic: also a fixed order "
        "of sums over microbatches, so that every data-parallel degree and ZeRO stage gives the same bits.",
    )
    compile: bool | Auto = key(
        AUTO,
        "Apply torch.compile to each block and the loss; auto: on accelerators, for the built-in decoder.",
    )
    residual_dtype: Literal["fp32", "bf16"] = key(
        "fp32",
        "Dtype of the built-in decoder's residual stream with dtype=bf16 or float8. Weights that ZeRO shards give bf16 "
        "in any case.",
    )
    weight_copies: bool | Auto = key(
        AUTO,
        "With dtype=bf16 or float8: keep a bf16 copy of the weights of the built-in decoder's products, made once per "
        "step, instead of casting them for each microbatch: 2 bytes per weight. auto: unless blocks are "
        "recomputed, and not of float8 products. Weights that ZeRO shards have none: they are cast as they are "
        "gathered.",
    )
    loss_chunks: int = key(
        1,
        "Parts into which the positions of a microbatch are split for the output head and the loss, so that logits of "
        "one part are in memory at a time. For large vocabularies; 1: not split.",
        minimum=1,
    )
    max_grad_norm: float = key(1.0, "Maximum global gradient norm; 0: no clipping.", minimum=0)
    callbacks: list[CallbackConfig] = key(
        [],
        "Callbacks: [{name: ema, args: {decay: 0.999}}, ...], or names alone. Built in: early_stopping, keep_best, "
        "ema, memory_snapshot, nvtx_ranges and garbage_collection; packages can register more.",
    )


@dataclass
class ParameterGroupConfig(Section):
    """Settings of the parameters whose names match a pattern."""

    pattern: str = key("", "Pattern of names, in which * stands for any text, ? for a character and [ab] for a choice.")
    lr_factor: float = key(1.0, "Factor of the learning rate.", minimum=0)
    weight_decay: float | Auto = key(AUTO, "Weight decay; auto: that of the other parameters.", minimum=0)
    frozen: bool = key(False, "Do not train these parameters: they have no gradients and no optimizer state.")


@dataclass
class OptimizerConfig(Section):
    """The optimizer and its peak learning rate."""

    name: Literal["adamw", "sgd", "muon"] | str = key(
        "adamw",
        "adamw: AdamW with decoupled weight decay; sgd: plain SGD; muon: Muon for the matrices of hidden layers, AdamW "
        "for all other parameters; or the path of a torch.optim.Optimizer class, such as torch.optim.RMSprop.",
    )
    args: dict[str, Any] = key(
        {}, "Keyword arguments of the class that optimizer.name gives as a path, such as {momentum: 0.9}."
    )
    lr: float = key(3e-3, "Peak learning rate.", above=0)
    beta1: float = key(0.9, "Decay rate of AdamW's first moment.", minimum=0)
    beta2: float = key(0.95, "Decay rate of AdamW's second moment.", minimum=0)
    eps: float = key(1e-8, "Epsilon of AdamW.", above=0)
    weight_decay: float = key(
        0.1,
        "Weight decay of parameters with two or more dimensions. A class path has its own in optimizer.args.",
        minimum=0,
    )
    moment_dtype: Literal["fp32", "bf16"] = key(
        "fp32",
        "Dtype of the moments of adamw and muon between steps. bf16: rounded after each step, half the memory, for "
        "decay rates up to 0.996: of larger ones a step's decrease would be rounded away.",
    )
    muon_momentum: float = key(0.95, "Decay rate of the momentum of name=muon.", minimum=0)
    muon_lr_factor: float = key(
        0.2,
        "Factor of a matrix's orthogonal update with name=muon, in addition to sqrt(max(rows, columns)). 0.2 matches "
        "the size of AdamW's updates in long runs (Liu et al. 2025).",
        above=0,
    )
    groups: list[ParameterGroupConfig] = key(
        [],
        'Settings of parameters by name: [{pattern: "*.norm*", lr_factor: 0.5, weight_decay: 0, frozen: false}, ...]. '
        "The first matching pattern applies.",
    )


@dataclass
class LrSchedulerConfig(Section):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "linear", "polynomial", "inverse_sqrt", "wsd", "constant"] = key(
        "cosine",
        "Learning rate after the warmup. cosine, linear and polynomial: decay to min_lr; inverse_sqrt: decay with the "
        "inverse square root of the step, not below min_lr; wsd: constant, then linear decay to min_lr; constant: stay "
        "at optimizer.lr.",
    )
    min_lr: float | Auto = key(
        AUTO, "Learning rate at the end of the schedule; auto: a tenth of optimizer.lr.", minimum=0
    )
    warmup_steps: int = key(15, "Steps of linear warmup.", minimum=0)
    decay_fraction: float = key(0.2, "Fraction of the steps in the final decay, with name=wsd.", minimum=0)
    power: float = key(1.0, "Exponent of the decay, with name=polynomial; 1: linear.", above=0)
    batch_scaling: Literal["none", "sqrt", "linear"] = key(
        "none",
        "Scaling of optimizer.lr with the batch. linear: times global_batch_size / base_batch_size; sqrt: times its "
        "square root.",
    )
    base_batch_size: int = key(
        0, "Global batch size for which optimizer.lr was tuned; required by batch_scaling.", minimum=0
    )


@dataclass
class EvalConfig(Section):
    """Evaluation on the validation split."""

    interval: int = key(0, "Steps between evaluations; 0: only at the end.", minimum=0)
    samples: int = key(512, "Validation windows per evaluation, spread over the split; 0: all.", minimum=0)


@dataclass
class LoraConfig(Section):
    """Low-rank adapters (LoRA) of the built-in decoder."""

    rank: int = key(0, "Train only low-rank adapters of this rank; 0: train all weights.", minimum=0)
    alpha: float = key(16.0, "Adapter outputs are scaled by alpha / rank.", above=0)
    target_modules: list[str] = key(
        ["qkv", "out", "gate", "up", "down"], "Linear layers with adapters: a subset of qkv, out, gate, up and down."
    )
