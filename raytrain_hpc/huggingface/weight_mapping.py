"""Which part of which tensor of a Decoder each tensor of a Hugging Face file is. Import and export read it two ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.huggingface.model_configs import get_family
from raytrain_hpc.state.shard_index import Box

# What files also hold: masks and frequencies that old versions stored as buffers.
IGNORED_SUFFIXES = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class WeightMapping:
    """A tensor of theirs, and the box that it is of a parameter of ours with this name and global shape."""

    hf_name: str
    name: str
    shape: tuple[int, ...]
    box: Box
    is_transposed: bool = False  # GPT-2's products are stored [inputs, outputs]

    @property
    def hf_shape(self) -> tuple[int, ...]:
        """Theirs; of an expert, which is a slice of ours, without the dimension of experts."""
        sizes = self.box.sizes[-2:]
        return sizes[::-1] if self.is_transposed else sizes

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.box.sizes)

    def to_native(self, tensor: Tensor) -> Tensor:
        """Their tensor, as a view that fits the box."""
        return (tensor.t() if self.is_transposed else tensor).view(self.box.sizes)


def build_weight_mappings(spec: ModelSpec) -> list[WeightMapping]:
    """All tensors of a model of this shape, in the order of its layers. ModelError as in `families.family_of`."""
    return list(_map_gpt2(spec) if get_family(spec) == "gpt2" else _map_rotary_decoder(spec))


def _map_whole_tensor(hf_name: str, name: str, *shape: int, is_transposed: bool = False) -> WeightMapping:
    return WeightMapping(hf_name, name, shape, Box.from_shape(shape), is_transposed)


def _map_rotary_decoder(spec: ModelSpec) -> Iterator[WeightMapping]:
    """Llama's names; Qwen3's and Mixtral's are these, with some of their own."""
    table = (spec.vocab_size, spec.hidden_size)
    yield _map_whole_tensor("model.embed_tokens.weight", "embedding.weight", *table)
    for number in range(spec.num_layers):
        there, here = f"model.layers.{number}.", f"layers.{number}."
        yield _map_whole_tensor(f"{there}input_layernorm.weight", f"{here}attention_norm.weight", spec.hidden_size)
        yield from _map_attention(spec, f"{there}self_attn.", f"{here}attention.")
        yield _map_whole_tensor(f"{there}post_attention_layernorm.weight", f"{here}mlp_norm.weight", spec.hidden_size)
        if spec.num_experts:
            yield from _map_experts(spec, f"{there}block_sparse_moe.", f"{here}mlp.")
        else:
            yield from _map_feed_forward(spec, f"{there}mlp.", f"{here}mlp.")
    yield _map_whole_tensor("model.norm.weight", "norm.weight", spec.hidden_size)
    if not spec.tie_embeddings:
        yield _map_whole_tensor("lm_head.weight", "head.weight", *table)


def _map_attention(spec: ModelSpec, hf_prefix: str, prefix: str) -> Iterator[WeightMapping]:
    """Their three matrices are ours, one below the other."""
    width, rows = spec.hidden_size, spec.attention_size + 2 * spec.kv_size
    first = 0
    for name, size in (("q", spec.attention_size), ("k", spec.kv_size), ("v", spec.kv_size)):
        part = Box((first, 0), (size, width))
        yield WeightMapping(f"{hf_prefix}{name}_proj.weight", f"{prefix}qkv.weight", (rows, width), part)
        if spec.bias:
            yield WeightMapping(f"{hf_prefix}{name}_proj.bias", f"{prefix}qkv.bias", (rows,), Box((first,), (size,)))
        first += size
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
    """Each expert of theirs is a slice of ours."""
    experts, up, down = spec.num_experts, (spec.ffn_size, spec.hidden_size), (spec.hidden_size, spec.ffn_size)
    yield _map_whole_tensor(f"{hf_prefix}gate.weight", f"{prefix}router.weight", experts, spec.hidden_size)
    for expert in range(experts):
        for theirs, ours, size in (("w1", "gate", up), ("w2", "down", down), ("w3", "up", up)):
            part = Box((expert, 0, 0), (1, *size))
            yield WeightMapping(
                f"{hf_prefix}experts.{expert}.{theirs}.weight", f"{prefix}experts.{ours}", (experts, *size), part
            )


def _map_gpt2(spec: ModelSpec) -> Iterator[WeightMapping]:
    width, rows = spec.hidden_size, spec.attention_size + 2 * spec.kv_size
    yield _map_whole_tensor("transformer.wte.weight", "embedding.weight", spec.vocab_size, width)
    yield _map_whole_tensor("transformer.wpe.weight", "positions.weight", spec.max_positions, width)
    for number in range(spec.num_layers):
        there, here = f"transformer.h.{number}.", f"layers.{number}."
        for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            yield _map_whole_tensor(f"{there}{theirs}.weight", f"{here}{ours}.weight", width)
            yield _map_whole_tensor(f"{there}{theirs}.bias", f"{here}{ours}.bias", width)
        for theirs, ours, outputs, inputs in (
            ("attn.c_attn", "attention.qkv", rows, width),
            ("attn.c_proj", "attention.out", width, spec.attention_size),
            ("mlp.c_fc", "mlp.up", spec.ffn_size, width),
            ("mlp.c_proj", "mlp.down", width, spec.ffn_size),
        ):
            yield _map_whole_tensor(
                f"{there}{theirs}.weight", f"{here}{ours}.weight", outputs, inputs, is_transposed=True
            )
            yield _map_whole_tensor(f"{there}{theirs}.bias", f"{here}{ours}.bias", outputs)
    yield _map_whole_tensor("transformer.ln_f.weight", "norm.weight", width)
    yield _map_whole_tensor("transformer.ln_f.bias", "norm.bias", width)
    if not spec.tie_embeddings:
        yield _map_whole_tensor("lm_head.weight", "head.weight", spec.vocab_size, width)
