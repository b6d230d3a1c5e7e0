"""Shell stand-ins for cluster commands, first on the PATH."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Like the real one: run the driver as a child, and end with its exit code.
RAY = 'echo "ray $*" >> "$LOG"; while [ "$1" != -- ]; do shift; done; shift; "$@"; exit $?'
DRIVER = """
    printf "%s\\n" "driver" "$@" >> "$LOG"
    trap 'echo "driver saves" >> "$LOG"; exit ${STOPS_WITH:-3}' TERM
    [ -z "$ENDS_WITH" ] || exit "$ENDS_WITH"
    echo ready >> "$LOG"
    for i in $(seq 400); do sleep 0.05; done"""


def install_fake_commands(directory: Path, commands: Mapping[str, str]) -> dict[str, str]:
    """Install stand-ins for these commands, Ray and the driver, which log to $LOG; return their environment."""
    for name, body in {"ray": RAY, "raytrain-hpc": DRIVER, **commands}.items():
        path = directory / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    (directory / "tmp").mkdir()
    paths = {"PATH": f"{directory}:{os.environ['PATH']}", "LOG": str(directory / "log")}
    return os.environ | paths | {"TMPDIR": str(directory / "tmp"), "ENDS_WITH": ""}
