"""Export of a run that trains a transformers model by its own code (`model.hf`): its weights and configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from raytrain_hpc.checkpoint.manifest import HF_CONFIG_KEY, Checkpoint
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard


def write_transformers_model(checkpoint: Checkpoint, directory: Path, dtype: str | None) -> str:
    """Write config.json and weights, as `save_pretrained` does. Return the type of the model ("llama").

    `dtype`: of the weights; None: that of the checkpoint. Raises CheckpointError if the checkpoint lacks a weight.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    content: dict[str, Any] = dict(checkpoint.meta[HF_CONFIG_KEY])
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    stored_dtype = torch.float64 if checkpoint.meta["dtype"] == "fp64" else torch.float32
    model: Any = AutoModelForCausalLM.from_config(config, dtype=stored_dtype)  # type: ignore[no-untyped-call]
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    names = [name for name in model.state_dict() if name in tensors]
    if missing := [name for name in names if f"model.{name}" not in checkpoint.index]:
        raise CheckpointError(f"{checkpoint.path}: lacks {missing[0]}; use the version of transformers that trained it")
    read_state(checkpoint, ShardedState(StateShard.from_tensor(f"model.{n}", tensors[n].detach()) for n in names))
    (model if dtype is None else model.to(TORCH_DTYPES[dtype])).save_pretrained(directory)
    return str(config.model_type)
