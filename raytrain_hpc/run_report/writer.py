"""Write the HTML report of runs to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from raytrain_hpc.errors import ConfigError, RunDirectoryError
from raytrain_hpc.run_report.html_page import render_page
from raytrain_hpc.run_report.run_reader import read_run


def report(run_dirs: Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write an HTML report of these runs and return its path.

    With a single run, `out` defaults to report.html in its directory. Raises RunDirectoryError if a directory holds no
    run or the file cannot be written.
    """
    if not run_dirs:
        raise ConfigError("RUN_DIR", "", "report", "pass at least one run directory")
    if out is None and len(run_dirs) > 1:
        raise ConfigError("out", "", "report", "is required for several runs; pass the path of the page")
    path = Path(run_dirs[0]).expanduser() / "report.html" if out is None else Path(out).expanduser()
    text = render_page([read_run(run_dir) for run_dir in run_dirs])
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}") from error
    return path
