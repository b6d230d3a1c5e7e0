"""Atomic creation of directories, and the small files of a Hugging Face model directory."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytrain_hpc.errors import CheckpointError, ModelError

GENERATION_CONFIG_FILE = "generation_config.json"
SPECIAL_TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Files of a model directory, besides config and weights, that are copied unchanged.
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

_URL_PATTERN = re.compile(r"\w+:/")  # pathlib makes s3:/bucket of s3://bucket


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yield a staging directory that is renamed to `out` on success and removed on failure.

    Raises CheckpointError if `out` is a file, a non-empty directory or in an object store, or if it cannot be written.
    """
    if _URL_PATTERN.match(str(out)):
        raise CheckpointError(f"{out}: only a local directory can be written; give one, and copy it from there")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists already; choose another directory, or remove it")
    staging = out.absolute().with_name(f".{out.name}.{os.getpid()}")
    try:
        staging.mkdir(parents=True)
        yield staging
        if out.exists():
            out.rmdir()
        staging.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises ModelError if it cannot be read or is not an object."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: cannot be read: {reason}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: is not a JSON object")
    return content
