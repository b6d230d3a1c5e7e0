"""Check before a run directory is used again: the settings must be those that its run was trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import yaml

from raytrain_hpc.checkpoint.manifest import HF_CONFIG_KEY, LORA_META_KEY, Checkpoint
from raytrain_hpc.config.fixed_settings import ChangedSetting, find_changed_setting
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import ConfigError, RunDirectoryError

# Keys of a checkpoint's metadata that have another name than the setting.
_SETTING_OF = {
    "dtype": "train.dtype",
    "optimizer": "optimizer.name",
    f"{LORA_META_KEY}.rank": "lora.rank",
    f"{LORA_META_KEY}.alpha": "lora.alpha",
    "data.seed": "run.seed",
    "seq_len": "train.seq_len",
}
_DECODER, _CUSTOM_MODEL = "the built-in decoder", "a model or script of the caller"


def check_resumable(
    config: Config, identity: Mapping[str, Any], directory: RunDirectory, checkpoint: Checkpoint
) -> None:
    """Raise ConfigError if the run in the directory was trained with other settings, or beyond `train.steps`.

    `identity`: what the current settings resolve to, as in the metadata of `checkpoint`, the newest of the run.
    """
    changed = find_changed_setting(_read_settings(directory), config) or _find_changed_identity(checkpoint, identity)
    if changed is not None:
        raise _build_error(config, changed, has_decoder=identity["model"] is not None)
    if config.train.steps < checkpoint.step:
        remedy = (
            f"the run in {config.run.dir} is at step {checkpoint.step}; set at least that, or choose another run.dir"
        )
        raise ConfigError("train.steps", config.train.steps, config.origin("train.steps"), remedy)


def _read_settings(directory: RunDirectory) -> dict[str, Any]:
    """Return the settings in config.yaml; {} if the directory has none."""
    if not directory.config.exists():
        return {}
    try:
        settings = yaml.safe_load(directory.config.read_text())
    except (OSError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RunDirectoryError(f"{directory.config}: cannot be read: {reason}; choose another run.dir") from error
    return settings if isinstance(settings, dict) else {}


def _build_error(config: Config, changed: ChangedSetting, *, has_decoder: bool) -> ConfigError:
    key, old, new = changed
    trained_with = repr(old)
    if key == "data.dataset_hash":
        trained_with = f"other data (hash {str(old)[:12]}, not {str(new)[:12]})"
        key = "data.sources" if config.data.sources else "data.path"
        new = [source.path for source in config.data.sources] or config.data.path
    remedy = f"the run in {config.run.dir} was trained with {trained_with}; set it back, or choose another run.dir"
    if has_decoder and not key.startswith("model") and key != "run.init_from":
        remedy += f" (there, run.init_from={config.run.dir} starts from its weights)"
    return ConfigError(key, new, config.origin(key), remedy)


def _find_changed_identity(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> ChangedSetting | None:
    """Return the first difference between what the settings resolve to and what the checkpoint was trained with."""
    for name, current in identity.items():
        stored = checkpoint.meta.get(name)
        if name == "model" and stored is not None:  # adds fields that older checkpoints lack
            stored = asdict(ModelSpec.from_json(stored))
        if stored == current:
            continue
        if name == "model" and (stored is None or current is None):
            return ChangedSetting(name, *(_DECODER if spec else _CUSTOM_MODEL for spec in (stored, current)))
        if not isinstance(current, Mapping):
            return ChangedSetting(_SETTING_OF.get(name, name), stored, current)
        stored, is_transformers = stored or {}, name == HF_CONFIG_KEY
        # Versions of transformers differ in the keys that they write.
        keys = [key for key in (*current, *stored) if not is_transformers or (key in stored and key in current)]
        changed_keys = [key for key in keys if stored.get(key) != current.get(key)]
        if changed_keys:
            setting = "model.hf" if is_transformers else f"{name}.{changed_keys[0]}"
            old, new = (values.get(changed_keys[0]) for values in (stored, current))
            return ChangedSetting(_SETTING_OF.get(setting, setting), old, new)
    return None
