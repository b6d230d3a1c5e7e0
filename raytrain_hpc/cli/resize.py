"""`raytrain-hpc resize`: change the number of workers of a running run from another shell."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Literal

import click

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.cli.options import print_errors_on_one_line
from raytrain_hpc.driver.mailbox import Mailbox
from raytrain_hpc.driver.resize_request import send_resize
from raytrain_hpc.errors import ConfigError, RunDirectoryError
from raytrain_hpc.storage.location import Location, parse_location

_REPLY_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.2


@click.command()
@click.argument("run_dir")
@click.argument("workers")
@click.option("--wait", "wait_s", type=float, default=60.0, show_default=True, help="Seconds to wait for the change.")
@print_errors_on_one_line
def resize(run_dir: str, workers: str, wait_s: float) -> None:
    """Continue a running run on WORKERS workers, from a step boundary on; auto: follow the cluster again.

    Prints the number of workers that train when the change has taken place, or after --wait seconds.
    """
    number = _parse_workers(workers)
    try:
        path = parse_location(run_dir)
    except ValueError as error:
        remedy = f"not a path or URL of an object store: {error}"
        raise ConfigError("RUN_DIR", run_dir, "command line", remedy) from error
    if isinstance(path, Path) and not path.is_dir():
        raise RunDirectoryError(f"{run_dir}: no such run directory; give the run.dir of a running run")
    if not _is_running(path):
        raise RunDirectoryError(f"{run_dir}: no run is running there; start it with cluster.workers={workers}")
    mailbox = Mailbox(path)
    size_before = _read_size(mailbox)
    reply = send_resize(mailbox, number, _REPLY_TIMEOUT_S)
    room = f"; the cluster has {reply.free} free" if reply.free and reply.target > reply.previous else ""
    click.echo(f"{run_dir}: {reply.target} workers wanted, {reply.previous} before{room}")
    deadline, size = time.monotonic() + wait_s, size_before
    has_changed = False
    while not has_changed and time.monotonic() < deadline and _is_running(path):
        time.sleep(_POLL_INTERVAL_S)
        size = _read_size(mailbox)
        # The cluster can change meanwhile: any other size is one that it has room for.
        has_changed = size == reply.target or (number == "auto" and size != size_before)
    if has_changed:
        click.echo(f"{size} workers train")
    else:
        click.echo(
            f"{size} workers train now; others join at a step boundary when there is room for them and they have "
            "started, and until then the run continues as it is"
        )


def _parse_workers(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError("workers", text, "command line", "needs a number of at least 1, or auto")
    return int(text)


def _is_running(path: Location) -> bool:
    try:
        Lease.check_available(path)
    except RunDirectoryError:
        return True
    return False


def _read_size(mailbox: Mailbox) -> int:
    """Return the number of ranks of the current generation, 0 before the first one."""
    content = mailbox.read("workers.json")
    return 0 if content is None else len(json.loads(content)["workers"])
