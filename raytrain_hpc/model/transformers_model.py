"""Causal language models of transformers: built from a directory, run on packed tokens, and their own sharding plan."""

from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ConfigError, MissingDependencyError, ModelError
from raytrain_hpc.model.document_positions import compute_document_positions

_WEIGHT_FILES = tuple(
    f"{name}{suffix}" for name in ("model.safetensors", "pytorch_model.bin") for suffix in ("", ".index.json")
)
_IGNORE_INDEX = -100


def read_hf_config(config: Config) -> dict[str, Any]:
    """Return the content of the config.json of `model.hf`. Raises ConfigError if there is none that transformers knows.

    Raises MissingDependencyError without transformers.
    """
    path = Path(config.model.hf).expanduser()
    if find_spec("transformers") is None:
        raise MissingDependencyError(f"model.hf={path}: needs transformers; run `pip install transformers`")
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise _make_error(config, "no config.json there; give the directory of a transformers model")
    try:
        content: dict[str, Any] = json.loads(AutoConfig.from_pretrained(path).to_json_string(use_diff=False))
    except (OSError, ValueError, KeyError) as error:
        raise _make_error(config, " ".join(str(error).split())[:300]) from error
    # They do not change the model, but with its place and the version of transformers.
    return {key: value for key, value in content.items() if key not in ("_name_or_path", "transformers_version")}


def _make_error(config: Config, remedy: str) -> ConfigError:
    return ConfigError("model.hf", config.model.hf, config.origin("model.hf"), remedy)


def make_factory(config: Config) -> Any:
    """Return the model factory of `model.hf`, which every worker calls."""
    return partial(_build_causal_lm, str(Path(config.model.hf).expanduser().absolute()))


def _build_causal_lm(path: str, config: Config) -> nn.Module:
    """Load the model with its weights, or with random ones if the directory has none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if any((Path(path) / name).exists() for name in _WEIGHT_FILES):
        loaded: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return loaded
    hf_config = AutoConfig.from_pretrained(path)
    built: nn.Module = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    return built


def run_causal_lm(module: nn.Module, batch: Any) -> Tensor:
    """Return the logits of a batch of tokens.

    Where rows hold several documents, positions start anew in each; transformers restricts attention to a document by
    that.
    """
    positions = None if batch.documents is None else compute_document_positions(batch.documents)
    logits: Tensor = module(input_ids=batch.inputs, position_ids=positions, use_cache=False).logits
    return logits


@torch.no_grad()
def check_document_isolation(module: nn.Module, device: torch.device, name: str) -> None:
    """Raise ModelError unless a model keeps documents of one row apart. Call on all ranks, with weights loaded.

    The first document of two is changed, and the outputs of the second must stay the same. Some models of transformers
    ignore positions, or restrict attention in other ways.
    """
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=device)
    positions, is_training = compute_document_positions(documents), module.training
    tokens = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 4], [4, 3, 2, 1, 1, 2, 3, 4]], device=device) % 2
    tokens = tokens + torch.arange(2, device=device).view(2, 1) * (documents == 0)
    module.eval()
    first, second = (module(input_ids=row[None], position_ids=positions, use_cache=False).logits for row in tokens)
    module.train(is_training)
    if not torch.allclose(first[:, 4:], second[:, 4:], rtol=1e-4, atol=1e-5):
        raise ModelError(
            f"model.hf={name}: with data.packing=documents, this model lets a document see the one before it; use "
            "data.packing=padded or stream"
        )


def compute_loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over the targets, in at least fp32."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=_IGNORE_INDEX, reduction="sum")
