"""Model settings of run.init_from, read from its newest manifest without torch. Checksums are not verified."""

from __future__ import annotations

import json
from typing import Any

import yaml

from raytrain_hpc.config.model_spec import ModelSpec, spec_to_settings
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.storage.location import Location, list_directory_names, make_absolute, parse_location

INIT_FROM_KEY = "run.init_from"


def find_model_source(init_from: str, run_dir: str) -> str:
    """Return the directory to read the model of a run from: its own once it has a checkpoint, else `init_from`.

    A run can therefore be resumed after `init_from` was deleted or overwritten. Raises ConfigError for a `run_dir` that
    cannot be read.
    """
    try:
        settings = yaml.safe_load((parse_location(run_dir) / "config.yaml").read_bytes())
        stored = ((settings or {}).get("run") or {}).get("init_from")
        is_own = bool(stored) and make_absolute(str(stored)) == make_absolute(init_from) and _list_manifests(run_dir)
    except FileNotFoundError:
        return init_from  # a new run
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("run.dir", run_dir, "", f"cannot be read: {reason}; choose another run.dir") from error
    return run_dir if is_own else init_from


def _list_manifests(directory: str) -> list[Location]:
    """Return the manifests of the checkpoints in a run directory, oldest first. Raises OSError and ValueError."""
    checkpoints = parse_location(directory) / "checkpoints"
    steps = (checkpoints / name for name in list_directory_names(checkpoints) if name.startswith("step-"))
    return [path for step in steps if (path := step / "manifest.json").is_file()]


def read_model_settings(directory: str, origin: str) -> dict[str, Any]:
    """Return the `model.*` settings of the decoder in this run directory; empty for a custom model.

    Raises ConfigError if the directory holds no readable checkpoint.
    """
    try:
        manifests = _list_manifests(directory)
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
