"""Which part of which tensor of a Decoder each tensor of a Hugging Face file is. Import and export read it two ways."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor

from raytrain_hpc.config.model_spec import ModelShape
from raytrain_hpc.huggingface.model_configs import family_of
from raytrain_hpc.state.shard_index import Box

# What files also hold: masks and frequencies that old versions stored as buffers.
IGNORED_ENDS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True)
class Twin:
    """A tensor of theirs, and the box that it is of a parameter of ours with this name and global shape."""

    theirs: str
    name: str
    shape: tuple[int, ...]
    box: Box
    transposed: bool = False  # GPT-2's products are stored [inputs, outputs]

    @property
    def their_shape(self) -> tuple[int, ...]:
        """Theirs; of an expert, which is a slice of ours, without the dimension of experts."""
        sizes = self.box.sizes[-2:]
        return sizes[::-1] if self.transposed else sizes

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.box.sizes)

    def ours(self, tensor: Tensor) -> Tensor:
        """Their tensor, as a view that fits the box."""
        return (tensor.t() if self.transposed else tensor).view(self.box.sizes)


def twins_of(shape: ModelShape) -> list[Twin]:
    """All tensors of a model of this shape, in the order of its layers. ModelError as in `families.family_of`."""
    return list(_gpt2(shape) if family_of(shape) == "gpt2" else _rotary(shape))


def _whole(theirs: str, name: str, *shape: int, transposed: bool = False) -> Twin:
    return Twin(theirs, name, shape, Box.whole(shape), transposed)


def _rotary(shape: ModelShape) -> Iterator[Twin]:
    """Llama's names; Qwen3's and Mixtral's are these, with some of their own."""
    table = (shape.vocab_size, shape.hidden_size)
    yield _whole("model.embed_tokens.weight", "embedding.weight", *table)
    for number in range(shape.num_layers):
        there, here = f"model.layers.{number}.", f"layers.{number}."
        yield _whole(f"{there}input_layernorm.weight", f"{here}attention_norm.weight", shape.hidden_size)
        yield from _attention(shape, f"{there}self_attn.", f"{here}attention.")
        yield _whole(f"{there}post_attention_layernorm.weight", f"{here}mlp_norm.weight", shape.hidden_size)
        if shape.num_experts:
            yield from _experts(shape, f"{there}block_sparse_moe.", f"{here}mlp.")
        else:
            yield from _feed_forward(shape, f"{there}mlp.", f"{here}mlp.")
    yield _whole("model.norm.weight", "norm.weight", shape.hidden_size)
    if not shape.tie_embeddings:
        yield _whole("lm_head.weight", "head.weight", *table)


def _attention(shape: ModelShape, there: str, here: str) -> Iterator[Twin]:
    """Their three matrices are ours, one below the other."""
    width, rows = shape.hidden_size, shape.attention_size + 2 * shape.kv_size
    first = 0
    for name, size in (("q", shape.attention_size), ("k", shape.kv_size), ("v", shape.kv_size)):
        part = Box((first, 0), (size, width))
        yield Twin(f"{there}{name}_proj.weight", f"{here}qkv.weight", (rows, width), part)
        if shape.bias:
            yield Twin(f"{there}{name}_proj.bias", f"{here}qkv.bias", (rows,), Box((first,), (size,)))
        first += size
    yield _whole(f"{there}o_proj.weight", f"{here}out.weight", width, shape.attention_size)
    if shape.bias:
        yield _whole(f"{there}o_proj.bias", f"{here}out.bias", width)
    if shape.qk_norm:
        yield _whole(f"{there}q_norm.weight", f"{here}q_norm.weight", shape.head_dim)
        yield _whole(f"{there}k_norm.weight", f"{here}k_norm.weight", shape.head_dim)


def _feed_forward(shape: ModelShape, there: str, here: str) -> Iterator[Twin]:
    up, down = (shape.ffn_size, shape.hidden_size), (shape.hidden_size, shape.ffn_size)
    for name, size in (("gate", up), ("up", up), ("down", down)):
        yield _whole(f"{there}{name}_proj.weight", f"{here}{name}.weight", *size)
        if shape.bias:
            yield _whole(f"{there}{name}_proj.bias", f"{here}{name}.bias", size[0])


def _experts(shape: ModelShape, there: str, here: str) -> Iterator[Twin]:
    """Each expert of theirs is a slice of ours."""
    experts, up, down = shape.num_experts, (shape.ffn_size, shape.hidden_size), (shape.hidden_size, shape.ffn_size)
    yield _whole(f"{there}gate.weight", f"{here}router.weight", experts, shape.hidden_size)
    for expert in range(experts):
        for theirs, ours, size in (("w1", "gate", up), ("w2", "down", down), ("w3", "up", up)):
            part = Box((expert, 0, 0), (1, *size))
            yield Twin(f"{there}experts.{expert}.{theirs}.weight", f"{here}experts.{ours}", (experts, *size), part)


def _gpt2(shape: ModelShape) -> Iterator[Twin]:
    width, rows = shape.hidden_size, shape.attention_size + 2 * shape.kv_size
    yield _whole("transformer.wte.weight", "embedding.weight", shape.vocab_size, width)
    yield _whole("transformer.wpe.weight", "positions.weight", shape.max_positions, width)
    for number in range(shape.num_layers):
        there, here = f"transformer.h.{number}.", f"layers.{number}."
        for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
            yield _whole(f"{there}{theirs}.weight", f"{here}{ours}.weight", width)
            yield _whole(f"{there}{theirs}.bias", f"{here}{ours}.bias", width)
        for theirs, ours, outputs, inputs in (
            ("attn.c_attn", "attention.qkv", rows, width),
            ("attn.c_proj", "attention.out", width, shape.attention_size),
            ("mlp.c_fc", "mlp.up", shape.ffn_size, width),
            ("mlp.c_proj", "mlp.down", width, shape.ffn_size),
        ):
            yield _whole(f"{there}{theirs}.weight", f"{here}{ours}.weight", outputs, inputs, transposed=True)
            yield _whole(f"{there}{theirs}.bias", f"{here}{ours}.bias", outputs)
    yield _whole("transformer.ln_f.weight", "norm.weight", width)
    yield _whole("transformer.ln_f.bias", "norm.bias", width)
    if not shape.tie_embeddings:
        yield _whole("lm_head.weight", "head.weight", shape.vocab_size, width)
