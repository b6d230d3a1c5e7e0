"""Write the HTML report of runs to a file."""

from __future__ import annotations

from collections.abc import Sequence

from raytrain_hpc.errors import ConfigError, RunDirectoryError
from raytrain_hpc.run_report.html_page import render_page
from raytrain_hpc.run_report.run_reader import read_run
from raytrain_hpc.storage.location import Location, parse_location, write_atomically


def report(run_dirs: Sequence[str | Location], out: str | Location | None = None) -> Location:
    """Write an HTML report of these runs, and return its path or URL.

    With a single run, `out` defaults to report.html in its directory. Raises RunDirectoryError if a directory holds no
    run or the file cannot be written.
    """
    if not run_dirs:
        raise ConfigError("RUN_DIR", "", "report", "pass at least one run directory")
    if out is None and len(run_dirs) > 1:
        raise ConfigError("out", "", "report", "is required for several runs; pass the path of the page")
    text = render_page([read_run(run_dir) for run_dir in run_dirs])
    try:
        path = parse_location(str(run_dirs[0])) / "report.html" if out is None else parse_location(str(out))
    except ValueError as error:
        raise ConfigError("out", str(out), "report", str(error)) from error
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be written: {error.strerror}") from error
    return path
