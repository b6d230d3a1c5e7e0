"""Mapping between Hugging Face tensors and slices of the decoder's parameters, used by import and export."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.huggingface.model_configs import get_family
from raytrain_hpc.state.shard_index import Box

# Masks and frequencies that old versions of transformers stored as buffers.
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class WeightMapping:
    """A Hugging Face tensor, and the box of the decoder's parameter `name` (of global shape `shape`) that it holds."""

    hf_name: str
    name: str
    shape: tuple[int, ...]
    box: Box
    is_transposed: bool = False  # GPT-2 stores linear weights as [inputs, outputs]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Shape of the Hugging Face tensor; for an expert, without the expert dimension of the box."""
        sizes = self.box.sizes[-2:]
        return sizes[::-1] if self.is_transposed else sizes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.box.sizes)

    def to_native(self, tensor: Tensor) -> Tensor:
        """Return a view of a Hugging Face tensor in the shape of the box."""
        return (tensor.t() if self.is_transposed else tensor).view(self.box.sizes)


def build_weight_mappings(spec: ModelSpec) -> list[WeightMapping]:
    """Return the mappings of all tensors of a model, in layer order. Raises ModelError as `get_family`."""
    return list(_map_gpt2(spec) if get_family(spec) == "gpt2" else _map_rotary_decoder(spec))


def _map_whole_tensor(hf_name: str, name: str, *shape: int, is_transposed: bool = False) -> WeightMapping:
    return WeightMapping(hf_name, name, shape, Box.from_shape(shape), is_transposed)


def _map_rotary_decoder(spec: ModelSpec) -> Iterator[WeightMapping]:
    """Yield the mappings of Llama, and of Qwen3 and Mixtral, which share most of its names."""
    table = (spec.vocab_size, spec.hidden_size)
    yield _map_whole_tensor("model.embed_tokens.weight", "embedding.weight", *table)
    for layer in range(spec.num_layers):
        hf_prefix, prefix = f"model.layers.{layer}.", f"layers.{layer}."
        yield _map_whole_tensor(
            f"{hf_prefix}input_layernorm.weight", f"{prefix}attention_norm.weight", spec.hidden_size
        )
        yield from _map_attention(spec, f"{hf_prefix}self_attn.", f"{prefix}attention.")
        yield _map_whole_tensor(
            f"{hf_prefix}post_attention_layernorm.weight", f"{prefix}mlp_norm.weight", spec.hidden_size
        )
        if spec.num_experts:
            yield from _map_experts(spec, f"{hf_prefix}block_sparse_moe.", f"{prefix}mlp.")
        else:
            yield from _map_feed_forward(spec, f"{hf_prefix}mlp.", f"{prefix}mlp.")
    yield _map_whole_tensor("model.norm.weight", "norm.weight", spec.hidden_size)
    if not spec.tie_embeddings:
        yield _map_whole_tensor("lm_head.weight", "head.weight", *table)


def _map_attention(spec: ModelSpec, hf_prefix: str, prefix: str) -> Iterator[WeightMapping]:
    """Yield the mappings of attention: q, k and v are row ranges of the fused qkv weight."""
    width, rows = spec.hidden_size, spec.attention_size + 2 * spec.kv_size
    start = 0
    for name, size in (("q", spec.attention_size), ("k", spec.kv_size), ("v", spec.kv_size)):
        box = Box((start, 0), (size, width))
        yield WeightMapping(f"{hf_prefix}{name}_proj.weight", f"{prefix}qkv.weight", (rows, width), box)
        if spec.bias:
            yield WeightMapping(f"{hf_prefix}{name}_proj.bias", f"{prefix}qkv.bias", (rows,), Box((start,), (size,)))
        start += size
    yield _map_whole_tensor(f"{hf_prefix}o_proj.weight", f"{prefix}out.weight", width, spec.attention_size)
    if spec.bias:
        yield _map_whole_tensor(f"{hf_prefix}o_proj.bias", f"{prefix}out.bias", width)
    if spec.qk_norm:
        yield _map_whole_tensor(f"{hf_prefix}q_norm.weight", f"{prefix}q_norm.weight", spec.head_dim)
        yield _map_whole_tensor(f"{hf_prefix}k_norm.weight", f"{prefix}k_norm.weight", spec.head_dim)


def _map_feed_forward(spec: ModelSpec, hf_prefix: str, prefix: str) -> Iterator[WeightMapping]:
    up, down = (spec.ffn_size, spec.hidden_size), (spec.hidden_size, spec.ffn_size)
    for name, size in (("gate", up), ("up", up), ("down", down)):
        yield _map_whole_tensor(f"{hf_prefix}{name}_proj.weight", f"{prefix}{name}.weight", *size)
        if spec.bias:
            yield _map_whole_tensor(f"{hf_prefix}{name}_proj.bias", f"{prefix}{name}.bias", size[0])


def _map_experts(spec: ModelSpec, hf_prefix: str, prefix: str) -> Iterator[WeightMapping]:
    """Yield the mappings of a mixture of experts: each expert is a slice of a stacked weight."""
    experts, up, down = spec.num_experts, (spec.ffn_size, spec.hidden_size), (spec.hidden_size, spec.ffn_size)
    yield _map_whole_tensor(f"{hf_prefix}gate.weight", f"{prefix}router.weight", experts, spec.hidden_size)
    for expert in range(experts):
        for hf_name, name, size in (("w1", "gate", up), ("w2", "down", down), ("w3", "up", up)):
            box = Box((expert, 0, 0), (1, *size))
            yield WeightMapping(
                f"{hf_prefix}experts.{expert}.{hf_name}.weight", f"{prefix}experts.{name}", (experts, *size), box
            )


def _map_gpt2(spec: ModelSpec) -> Iterator[WeightMapping]:
    width, rows = spec.hidden_size, spec.attention_size + 2 * spec.kv_size
    yield _map_whole_tensor("transformer.wte.weight", "embedding.weight", spec.vocab_size, width)
    yield _map_whole_tensor("transformer.wpe.weight", "positions.weight", spec.max_positions, width)
    for layer in range(spec.num_layers):
        hf_prefix, prefix = f"transformer.h.{layer}.", f"layers.{layer}."
        for hf_name, name in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            yield _map_whole_tensor(f"{hf_prefix}{hf_name}.weight", f"{prefix}{name}.weight", width)
            yield _map_whole_tensor(f"{hf_prefix}{hf_name}.bias", f"{prefix}{name}.bias", width)
        for hf_name, name, outputs, inputs in (
            ("attn.c_attn", "attention.qkv", rows, width),
            ("attn.c_proj", "attention.out", width, spec.attention_size),
            ("mlp.c_fc", "mlp.up", spec.ffn_size, width),
            ("mlp.c_proj", "mlp.down", width, spec.ffn_size),
        ):
            yield _map_whole_tensor(
                f"{hf_prefix}{hf_name}.weight", f"{prefix}{name}.weight", outputs, inputs, is_transposed=True
            )
            yield _map_whole_tensor(f"{hf_prefix}{hf_name}.bias", f"{prefix}{name}.bias", outputs)
    yield _map_whole_tensor("transformer.ln_f.weight", "norm.weight", width)
    yield _map_whole_tensor("transformer.ln_f.bias", "norm.bias", width)
    if not spec.tie_embeddings:
        yield _map_whole_tensor("lm_head.weight", "head.weight", spec.vocab_size, width)
