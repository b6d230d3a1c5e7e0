"""Opening of the dataset that the settings name, with errors that name the key."""

from __future__ import annotations

from pathlib import Path

from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE
from raytrain_hpc.data.dataset.sources import STDLIB, SYNTHETIC, Dataset, open_dataset
from raytrain_hpc.data.dataset.storage import is_remote
from raytrain_hpc.errors import ConfigError


def open_configured_dataset(config: Config) -> Dataset:
    """Open `data.path` or `data.sources`. Raises ConfigError if a local one was not prepared; see `open_dataset`."""
    paths = [("data.sources", source.path) for source in config.data.sources] or [("data.path", config.data.path)]
    for key, path in paths:
        if path not in (STDLIB, SYNTHETIC) and not is_remote(path):
            _check_prepared(config, key, path)
    vocab_size = None if config.model.vocab_size == "auto" else int(config.model.vocab_size)
    return open_dataset(config.data, vocab_size=vocab_size, seed=config.run.seed)


def _check_prepared(config: Config, key: str, path: str) -> None:
    """Raise ConfigError with the command that prepares the dataset, if there is none at a local path."""
    directory, origin = Path(path).expanduser(), config.origin(key)
    if (directory / MANIFEST_FILE).exists():
        return
    if directory.exists():
        out = f"{directory}-tokens" if directory.is_dir() else f"{directory.with_suffix('')}-tokens"
        remedy = (
            f"not a prepared dataset (no {MANIFEST_FILE}); write one: `raytrain-hpc prepare {path} --out {out}`, "
            f"then use {out}"
        )
    else:
        recipe, is_recipe = origin.partition(":")[0].removeprefix("recipe "), origin.startswith("recipe ")
        see = f"; `raytrain-hpc recipes {recipe}` shows how" if is_recipe else ""
        remedy = f"no such directory; write a dataset there: `raytrain-hpc prepare TEXT --out {path}`{see}"
    raise ConfigError(key, path, origin, remedy)
