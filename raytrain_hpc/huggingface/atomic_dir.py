"""Directories that are there as a whole or not at all, and the small files in them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytrain_hpc.errors import CheckpointError, ModelError

GENERATION_CONFIG_FILE = "generation_config.json"
SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What a model's directory has beside its weights, and what uses it needs as it is.
PASSTHROUGH_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    GENERATION_CONFIG_FILE,
)


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A new directory to fill, which becomes `out` at the end; nothing of it stays where that is not reached.

    Raises CheckpointError where `out` holds something already, or the disk refuses.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists already; give another directory, or remove it")
    making = out.absolute().with_name(f".{out.name}.{os.getpid()}")
    try:
        making.mkdir(parents=True)
        yield making
        if out.exists():
            out.rmdir()
        making.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError where there is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: cannot be read: {reason}") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return found
