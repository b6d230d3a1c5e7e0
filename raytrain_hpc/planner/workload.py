"""Workload and layout choice: the inputs of the cost model and the memory model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raytrain_hpc.config.field import Auto
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.config.training_config import computes_in_bf16
from raytrain_hpc.planner.activation_memory import Recompute
from raytrain_hpc.planner.layout import Batching, Layout

Offload = Literal["none", "cpu", "disk"]
ActivationOffload = Literal["none", "cpu"]


@dataclass(frozen=True)
class Workload:
    """A model and a training step: `global_batch_size` sequences of `seq_len` tokens, computed in `dtype`.

    `compiled`: whether blocks and loss are compiled. `bucket_bytes`: size of the gradient buckets of plain data
    parallelism. `loss_chunks`: parts of the positions for head and loss. `residual_dtype`: of the residual stream in
    bf16 and float8, unless ZeRO shards the weights. `weight_copies`: as `train.weight_copies`. `audited`: whether some
    steps are audited by ranks. `elastic`: whether `train.deterministic=elastic`. `quantized_weights`: whether shards
    travel in 8 bits.
    """

    spec: ModelSpec
    seq_len: int
    global_batch_size: int
    dtype: Literal["fp32", "bf16", "float8", "fp64"] = "bf16"
    optimizer: str = "adamw"
    compiled: bool = False
    bucket_bytes: int = 25 << 20
    loss_chunks: int = 1
    float8_head: bool = False
    residual_dtype: Literal["fp32", "bf16"] = "fp32"
    weight_copies: bool | Auto = "auto"
    moment_dtype: Literal["fp32", "bf16"] = "fp32"
    audited: bool = False
    elastic: bool = False
    quantized_weights: bool = False

    @property
    def compute_itemsize(self) -> int:
        """Bytes per element of the compute dtype, outside of float8 products."""
        return {"bf16": 2, "float8": 2, "fp32": 4, "fp64": 8}[self.dtype]

    @property
    def state_itemsize(self) -> int:
        """Bytes per element of weights and gradients."""
        return 8 if self.dtype == "fp64" else 4

    @property
    def moments_itemsize(self) -> int:
        """Bytes of all moments of an element. Every optimizer but plain SGD counts with two, also Muon."""
        if self.optimizer == "sgd":
            return 0
        return 2 * (2 if self.moment_dtype == "bf16" else self.state_itemsize)

    def get_residual_itemsize(self, layout: Layout) -> int:
        """Return the bytes per element of the residual stream."""
        is_narrow = self.residual_dtype == "bf16" or rounds_all_weights(self.dtype, layout, elastic=self.elastic)
        return 2 if self.compute_itemsize == 2 and is_narrow else self.state_itemsize

    def keeps_weight_copies(self, choice: LayoutChoice) -> tuple[bool, bool]:
        """Return whether a rank keeps copies of the weights of dense products, and of experts."""
        setting, dtype, layout = self.weight_copies, self.dtype, choice.layout
        if copies_all_weights(setting, dtype, layout, elastic=self.elastic, quantized=self.quantized_weights):
            return True, True
        return keeps_weight_copies(setting, dtype, layout, choice.recompute)


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, the microbatches, and the measures to save memory.

    `recompute_layers`: number of layers of each pipeline stage, the first ones, to which `recompute` applies; 0: all.
    """

    layout: Layout
    batching: Batching
    recompute: Recompute = "none"
    offload: Offload = "none"
    compiled: bool = False
    recompute_layers: int = 0
    activation_offload: ActivationOffload = "none"

    @property
    def microbatches_per_rank(self) -> int:
        """Microbatches of the data-parallel rank that has the most."""
        return -(-self.batching.count // self.layout.dp_size)

    def count_recomputed_layers(self, stage_layers: int) -> int:
        """Return how many of the layers of a stage are recomputed."""
        return 0 if self.recompute == "none" else min(stage_layers, self.recompute_layers or stage_layers)

    def describe_recompute(self) -> str:
        """Format the recomputation for a table: the policy, with the number of layers if it is not all of them."""
        return f"{self.recompute}:{self.recompute_layers}" if self.recompute_layers else self.recompute


def make_choice(config: Config, layout: Layout, batching: Batching) -> LayoutChoice:
    """Return the choice that the settings describe, with this layout and these microbatches."""
    p = config.parallel
    return LayoutChoice(
        layout,
        batching,
        p.activation_checkpointing,
        p.offload,
        config.train.compile is True,
        p.recompute_layers,
        p.activation_offload,
    )


def make_workload(config: Config, spec: ModelSpec) -> Workload:
    """Return the workload that these settings train. Call after `train.dtype` and `train.compile` were resolved."""
    train = config.train
    return Workload(
        spec,
        train.seq_len,
        train.global_batch_size,
        "fp32" if train.dtype == "auto" else train.dtype,
        config.optimizer.name,
        train.compile is True,
        bucket_bytes=config.parallel.bucket_mib << 20,
        loss_chunks=train.loss_chunks,
        float8_head=train.float8_head,
        residual_dtype=train.residual_dtype,
        weight_copies=train.weight_copies,
        moment_dtype=config.optimizer.moment_dtype,
        audited=config.fault.audit_interval != 0,
        elastic=train.deterministic == "elastic",
        quantized_weights=config.parallel.quantize in ("weights", "both"),
    )


def rounds_all_weights(dtype: str, layout: Layout, *, elastic: bool) -> bool:
    """Return whether every operation reads weights in bf16, not only products, and the residual stream is in bf16.

    FSDP2 gathers all weights in bf16. With elastic determinism, a single shard is rounded as several are.
    """
    return computes_in_bf16(dtype) and (layout.dp_shard > 1 or (elastic and layout.zero > 0))


def copies_all_weights(setting: bool | Auto, dtype: str, layout: Layout, *, elastic: bool, quantized: bool) -> bool:
    """Return whether a rank with a single shard keeps copies of all weights, rounded as gathered shards are.

    `setting`: `train.weight_copies`. `quantized`: shards travel in 8 bits.
    """
    rounds_shards = quantized or computes_in_bf16(dtype)
    return elastic and rounds_shards and layout.zero > 0 and layout.dp_shard == 1 and setting is not False


def keeps_weight_copies(setting: bool | Auto, dtype: str, layout: Layout, recompute: Recompute) -> tuple[bool, bool]:
    """Return whether a rank keeps bf16 copies of the weights of dense products, and of experts (`train.weight_copies`).

    FSDP2 casts the shards that it gathers instead. auto: unless blocks are recomputed. Otherwise what a forward pass
    casts stays until the backward pass has used it, so that copies need no more memory. Float8 products keep nothing.
    """
    if not computes_in_bf16(dtype) or layout.dp_shard > 1 or setting is False:
        return False, False
    if setting is True:
        return True, True
    return recompute == "none" and dtype != "float8", recompute == "none"
