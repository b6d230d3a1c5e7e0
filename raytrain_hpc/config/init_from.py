"""Model settings of run.init_from, read from its newest manifest without torch. Checksums are not verified."""

from __future__ import annotations

import json
from typing import Any

from raytrain_hpc.config.model_spec import ModelSpec, spec_to_settings
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.storage.location import list_directory_names, parse_location

INIT_FROM_KEY = "run.init_from"


def read_model_settings(directory: str, origin: str) -> dict[str, Any]:
    """Return the `model.*` settings of the decoder in this run directory; empty for a custom model.

    Raises ConfigError if the directory holds no readable checkpoint.
    """
    try:
        checkpoints = parse_location(directory) / "checkpoints"
        steps = (checkpoints / name for name in list_directory_names(checkpoints) if name.startswith("step-"))
        manifests = [path for step in steps if (path := step / "manifest.json").is_file()]
    except (OSError, ValueError) as error:
        raise ConfigError(INIT_FROM_KEY, directory, origin, f"cannot be read: {error}") from error
    if not manifests:
        remedy = "has no checkpoint; give a run directory, or one written by `raytrain-hpc import-hf` or `import-dcp`"
        raise ConfigError(INIT_FROM_KEY, directory, origin, remedy)
    try:
        meta = json.loads(manifests[-1].read_bytes())["meta"]
        if meta["model"] is None:  # custom model
            return {}
        return {
            "max_positions": meta.get("positions", meta["seq_len"]),
            **spec_to_settings(ModelSpec.from_json(meta["model"])),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(INIT_FROM_KEY, directory, origin, f"{manifests[-1]} cannot be read ({error!r})") from error
