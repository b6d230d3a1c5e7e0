"""Where things are kept that outlive a run and can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def get_cache_dir() -> Path:
    """$RAYTRAIN_CACHE, else $XDG_CACHE_HOME/raytrain_hpc, else ~/.cache/raytrain_hpc."""
    if chosen := os.environ.get("RAYTRAIN_CACHE"):
        return Path(chosen).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "raytrain_hpc"
    return Path("~/.cache/raytrain_hpc").expanduser()
