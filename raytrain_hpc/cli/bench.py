"""`raytrain-hpc bench`: run a benchmark and print its table."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from raytrain_hpc.bench import BENCHMARKS
from raytrain_hpc.cli.options import print_errors_on_one_line


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("what", type=click.Choice(BENCHMARKS))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Number of measurement rounds."
)
@click.option("--url", help="checkpoint: also save and load below this URL of an S3 store.")
@click.option(
    "--against",
    multiple=True,
    metavar="PEERS",
    help="step, device: also compare with transformers, torchtitan; step: with a clone, nanogpt=DIR; recovery: with "
    "ray-train, torchrun, torchft, nvrx, torch-reconfigure. Several: A,B.",
)
@click.option(
    "--python", "pythons", multiple=True, metavar="PEER=PATH", help="recovery: an interpreter of its own for a peer."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Also write the table as JSON to this file."
)
@print_errors_on_one_line
def bench(
    what: str,
    as_json: bool,
    rounds: int,
    url: str | None,
    against: tuple[str, ...],
    pythons: tuple[str, ...],
    out: Path | None,
) -> None:
    """Run a benchmark; most alternate between raytrain-hpc and a baseline, such as plain PyTorch or Ray Train."""
    if url is not None and what != "checkpoint":
        raise click.UsageError("--url: only `bench checkpoint` saves to a store")
    options: dict[str, Any] = {} if url is None else {"url": url}
    if against or pythons:
        from raytrain_hpc.bench.peer_check import parse_peers, parse_pythons  # imports torch

        try:
            options["against"] = parse_peers(what, against)
            if pythons:
                options["pythons"] = parse_pythons(pythons, options["against"] if what == "recovery" else ())
        except ValueError as error:
            raise click.UsageError(str(error)) from error
    if out is not None and not out.absolute().parent.is_dir():
        raise click.UsageError(f"--out {out}: {out.absolute().parent} is no directory")
    table = import_module(f"raytrain_hpc.bench.{what}").run(rounds=rounds, **options)
    text = json.dumps(table.to_json(), indent=2)
    if out is not None:
        out.write_text(text + "\n")
    click.echo(text if as_json else table.to_markdown())
