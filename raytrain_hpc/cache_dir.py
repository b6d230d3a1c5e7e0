"""Directory for files that outlive a run and can be recreated."""

from __future__ import annotations

import os
from pathlib import Path


def get_cache_dir() -> Path:
    """Return $RAYTRAIN_CACHE, else $XDG_CACHE_HOME/raytrain_hpc, else ~/.cache/raytrain_hpc."""
    if cache_dir := os.environ.get("RAYTRAIN_CACHE"):
        return Path(cache_dir).expanduser()
    if user_cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(user_cache) / "raytrain_hpc"
    return Path("~/.cache/raytrain_hpc").expanduser()
