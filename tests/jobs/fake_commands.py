"""Shell stand-ins for cluster commands, first on the PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Like the real one: run the driver as a child, and end with its exit code.
RAY = """
    echo "ray $*" >> "$LOG"; [ -z "$RAY_FAILS" ] || exit 1
    while [ "$1" != -- ]; do shift; done; shift; "$@"; exit $?"""
# A driver that logs its arguments and the end of the job as the package finds it.
DRIVER = f"""
    printf "%s\\n" "driver" "$@" >> "$LOG"
    program='import os; from raytrain_hpc.driver.job_deadline import find_job_end; print(find_job_end(os.environ).unix)'
    {sys.executable} -c "$program" > "$JOB_END"
    exit "$ENDS_WITH\""""


def install_fake_commands(directory: Path, commands: Mapping[str, str]) -> dict[str, str]:
    """Install stand-ins for these commands, Ray and the driver, which log to $LOG; return their environment."""
    for name, body in {"ray": RAY, "raytrain-hpc": DRIVER, **commands}.items():
        path = directory / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    (directory / "tmp").mkdir()
    (directory / "log").touch()
    paths = {"PATH": f"{directory}:{os.environ['PATH']}", "LOG": str(directory / "log"), "PYTHONPATH": str(ROOT)}
    paths |= {"TMPDIR": str(directory / "tmp"), "JOB_END": str(directory / "job_end")}
    return os.environ | paths | {"ENDS_WITH": "0", "RAY_FAILS": ""}


def run_job(script: Path, env: Mapping[str, str], *words: str) -> tuple[int, str, list[str]]:
    """Run a job script; return its exit code, its output and the lines that the stand-ins logged."""
    process = subprocess.run([str(script), *words], env=env, capture_output=True, text=True, timeout=60, check=False)
    return process.returncode, process.stdout + process.stderr, Path(env["LOG"]).read_text().splitlines()
