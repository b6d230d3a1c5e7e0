"""Names of torchtitan's dense decoders (Llama 3, Qwen3), and the parameters of the built-in decoder they belong to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.dcp.metadata_reader import DcpTensor
from raytrain_hpc.errors import ModelError
from raytrain_hpc.huggingface.weight_mapping import WeightMapping, build_weight_mappings

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"
# Modules that wrappers and newer versions of torchtitan insert into names.
_INSERTED = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module", "qkv_linear"}
# First parts of the names of state that is not a weight.
_OTHER_STATE = ("optimizer", "optim", "lr_scheduler", "dataloader", "train_state")
_RENAMED = {"lm_head.weight": HEAD}
_RECOMPUTED = ("freqs_cis", "rope.cache")  # tables of rotary positions, which some versions save
_HF_MODULES = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}
_HF_LAYER_MODULES = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
_ROTARY = {"attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm"}


@dataclass(frozen=True)
class DcpWeight:
    """A weight of a DCP directory, its parameter, and whether its rows are channels that rotary positions rotate."""

    tensor: DcpTensor
    mapping: WeightMapping
    is_rotary: bool


def find_weights(source: Path, tensors: Mapping[str, DcpTensor]) -> tuple[dict[str, DcpTensor], tuple[str, ...]]:
    """Return the weights by their name in torchtitan, and the first parts of the names of all other state.

    Wrappers in names are removed. Raises ModelError if two tensors then have one name, or if there is no embedding.
    """
    weights: dict[str, DcpTensor] = {}
    others: dict[str, None] = {}
    for name, tensor in tensors.items():
        if (first := name.partition(".")[0]) in _OTHER_STATE:
            others[first] = None
        elif (short := _shorten(name)).endswith(_RECOMPUTED):
            continue
        elif short in weights:
            raise ModelError(f"{source}: {name} and {weights[short].name} are two tensors for {short}")
        else:
            weights[short] = tensor
    if EMBEDDING not in weights:
        raise ModelError(
            f"{source}: has no {EMBEDDING}; only the names of torchtitan's Llama can be imported, and it has "
            f"{_describe_names(weights)}"
        )
    return weights, tuple(others)


def list_other_state(names: Iterable[str]) -> set[str]:
    """Return the first parts of the names of pickled objects, such as the step and the state of the data loader."""
    return {name.partition(".")[0] for name in names}


def _shorten(name: str) -> str:
    """Return the name of a weight without the names of wrappers."""
    parts = [part for part in name.split(".") if part not in _INSERTED]
    short = ".".join(parts[1:] if parts[:1] == ["model"] else parts)
    return _RENAMED.get(short, short)


def _describe_names(names: Iterable[str]) -> str:
    first = sorted(names)[:3]
    return f"{', '.join(first)}, ..." if first else "no weights"


def match_weights(source: Path, weights: Mapping[str, DcpTensor], spec: ModelSpec) -> list[DcpWeight]:
    """Return every weight of a model with its parameter, in layer order.

    Raises ModelError naming the first weight that is missing, that does not belong to the model or has another shape.
    """
    mappings = {_to_torchtitan_name(mapping.hf_name): mapping for mapping in build_weight_mappings(spec)}
    if missing := [name for name in mappings if name not in weights]:
        raise ModelError(f"{source}: lacks {missing[0]} and {len(missing) - 1} more of {len(mappings)} weights")
    tied = {HEAD} if spec.tie_embeddings else set()
    if unknown := sorted(weights.keys() - mappings.keys() - tied):
        raise ModelError(f"{source}: {weights[unknown[0]].name} does not belong to a Llama of {spec.num_layers} layers")
    matched = []
    for name, mapping in mappings.items():
        tensor = weights[name]
        if tensor.shape != mapping.hf_shape:
            raise ModelError(
                f"{source}: {tensor.name} is {list(tensor.shape)}; the other weights imply {list(mapping.hf_shape)}"
            )
        matched.append(DcpWeight(tensor, mapping, any(f".{module}." in name for module in _ROTARY)))
    return matched


def _to_torchtitan_name(hf_name: str) -> str:
    """Convert the name of a weight in Hugging Face's Llama or Qwen3 to that in torchtitan."""
    module, _, kind = hf_name.rpartition(".")
    if module in _HF_MODULES:
        return f"{_HF_MODULES[module]}.{kind}"
    layer, _, module = module.removeprefix("model.layers.").partition(".")
    return f"layers.{layer}.{_HF_LAYER_MODULES[module]}.{kind}"
