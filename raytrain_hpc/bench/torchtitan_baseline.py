"""torchtitan's Llama 3 with the sizes and the initial weights of the platform's model, for torchtitan 0.3.

Blocks are compiled one by one and sharded by FSDP2, which also casts to bf16, as torchtitan's `parallelize_llama` does
on any number of GPUs; that function itself needs one. Attention is its `ScaledDotProductAttention`, since sequences
have no documents and FlexAttention has no backward pass on CPUs.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from raytrain_hpc.bench.peer_weights import build_hf_weights
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.errors import ModelError
from raytrain_hpc.huggingface.model_configs import get_family

# torchtitan imports this name for its `parallelize_llama`, which is not called here. torch 2.11 does not have it.
_MESH_DIMS = "DataParallelMeshDims"
with patch.object(distributed.fsdp, _MESH_DIMS, getattr(distributed.fsdp, _MESH_DIMS, object), create=True):
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm, ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
    from torchtitan.models.llama3 import Llama3Model
    from torchtitan.models.llama3.model import Llama3TransformerBlock
    from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter


def build_torchtitan_model(spec: ModelSpec, seed: int, seq_len: int, num_threads: int = 1) -> nn.Module:
    """Build the model in fp32, on the CPU.

    Raises ModelError for a model that is no Llama without biases.
    """
    if get_family(spec) != "llama" or spec.bias:
        raise ModelError("--against torchtitan: its Llama 3 has rotary positions, RMSNorm, SwiGLU and no biases")
    config = _build_config(spec, seq_len)
    model: nn.Module = config.build()
    adapter = Llama3StateDictAdapter(config, None)
    model.load_state_dict(adapter.from_hf(build_hf_weights(spec, seed, num_threads)))
    return model


def _build_config(spec: ModelSpec, seq_len: int) -> Any:
    """Return torchtitan's config of the model. Initializers are left out, as the weights are loaded."""
    width, vocab_size = spec.hidden_size, spec.vocab_size
    rope = ComplexRoPE.Config(
        dim=spec.head_dim,
        max_seq_len=seq_len,
        theta=spec.rope_theta,
        scaling="llama" if spec.rope_factor > 1 else "none",
        scaling_factor=spec.rope_factor,
        low_freq_factor=spec.rope_low_freq_factor,
        high_freq_factor=spec.rope_high_freq_factor,
        original_max_position_embeddings=spec.rope_original_max_positions,
    )
    block = Llama3TransformerBlock.Config(
        attention_norm=RMSNorm.Config(normalized_shape=width, eps=spec.norm_eps),
        ffn_norm=RMSNorm.Config(normalized_shape=width, eps=spec.norm_eps),
        attention=make_gqa_config(
            dim=width,
            n_heads=spec.num_heads,
            n_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            wqkv_param_init={},
            wo_param_init={},
            inner_attention=ScaledDotProductAttention.Config(),
            rope=rope,
            fuse_qkv=True,
        ),
        feed_forward=make_ffn_config(dim=width, hidden_dim=spec.ffn_size, w1_param_init={}, w2w3_param_init={}),
    )
    return Llama3Model.Config(
        dim=width,
        vocab_size=vocab_size,
        enable_weight_tying=spec.tie_embeddings,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=width),
        norm=RMSNorm.Config(normalized_shape=width, eps=spec.norm_eps),
        lm_head=Linear.Config(in_features=width, out_features=vocab_size),
        layers=[block] * spec.num_layers,
    )


def shard_torchtitan_model(model: nn.Module, mesh: DeviceMesh, *, compile: bool, dtype: str) -> None:
    """Compile the blocks if `compile`, then apply FSDP2 to every block and to the rest. Call on the device.

    `dtype`: "bf16" casts parameters and activations; gradients are reduced in fp32.
    """
    param_dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    blocks: Any = model.layers
    for block in blocks.values():
        if compile:
            block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def compute_torchtitan_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of torchtitan's cross entropy, a scalar. logits: [b, t, vocab_size]; targets: int64 [b, t]."""
    loss: Tensor = cross_entropy_loss(logits, targets) / targets.numel()
    return loss
