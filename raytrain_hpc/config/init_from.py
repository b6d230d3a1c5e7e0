"""Model settings of run.init_from, read from its newest manifest without torch. Checksums are not verified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytrain_hpc.config.model_spec import ModelSpec, spec_to_settings
from raytrain_hpc.errors import ConfigError

INIT_FROM_KEY = "run.init_from"


def read_model_settings(directory: str, origin: str) -> dict[str, Any]:
    """Return the `model.*` settings of the decoder in this run directory; empty for a custom model.

    Raises ConfigError if the directory holds no readable checkpoint.
    """
    manifests = sorted(Path(directory).expanduser().glob("checkpoints/step-*/manifest.json"))
    if not manifests:
        remedy = "has no checkpoint; give a run directory, or one written by `raytrain-hpc import-hf`"
        raise ConfigError(INIT_FROM_KEY, directory, origin, remedy)
    try:
        meta = json.loads(manifests[-1].read_text())["meta"]
        if meta["model"] is None:  # custom model
            return {}
        return {
            "max_positions": meta.get("positions", meta["seq_len"]),
            **spec_to_settings(ModelSpec.from_json(meta["model"])),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(INIT_FROM_KEY, directory, origin, f"{manifests[-1]} cannot be read ({error!r})") from error
