"""The shape of a model that a run starts from, read from its newest checkpoint. No torch, and nothing is verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytrain_hpc.config.model_spec import ModelSpec, spec_to_settings
from raytrain_hpc.errors import ConfigError

INIT_FROM_KEY = "run.init_from"


def read_model_settings(directory: str, origin: str) -> dict[str, Any]:
    """Keys of section `model` that make the decoder in this run directory.

    Raises ConfigError where it holds no checkpoint of a decoder.
    """
    manifests = sorted(Path(directory).expanduser().glob("checkpoints/step-*/manifest.json"))
    if not manifests:
        remedy = "has no checkpoint; give a run directory, or what `raytrain-hpc import-hf` wrote"
        raise ConfigError(INIT_FROM_KEY, directory, origin, remedy)
    try:
        meta = json.loads(manifests[-1].read_text())["meta"]
        if meta["model"] is None:  # a module of the caller's own
            return {}
        return {"max_positions": meta.get("positions", meta["seq_len"]), **spec_to_settings(ModelSpec(**meta["model"]))}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(INIT_FROM_KEY, directory, origin, f"{manifests[-1]} cannot be read ({error!r})") from error
