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
@click.option("--against", multiple=True, metavar="NAME=DIR", help="step: also compare with a clone (nanogpt=DIR).")
@print_errors_on_one_line
def bench(what: str, as_json: bool, rounds: int, url: str | None, against: tuple[str, ...]) -> None:
    """Run a benchmark; most alternate between raytrain-hpc and a baseline, such as plain PyTorch or Ray Train."""
    if url is not None and what != "checkpoint":
        raise click.UsageError("--url: only `bench checkpoint` saves to a store")
    options: dict[str, Any] = {} if url is None else {"url": url}
    if against:
        options["against"] = _parse_clones(what, against)
    table = import_module(f"raytrain_hpc.bench.{what}").run(rounds=rounds, **options)
    click.echo(json.dumps(table.to_json(), indent=2) if as_json else table.to_markdown())


def _parse_clones(what: str, words: tuple[str, ...]) -> dict[str, Path]:
    """Return clones by the name of the trainer. Raises UsageError for a word that cannot be used."""
    pairs = [word.partition("=") for word in words]
    clones = {name: Path(directory) for name, _, directory in pairs if directory}
    if what != "step" or set(clones) != {"nanogpt"} or len(clones) != len(words):
        raise click.UsageError(f"--against {' '.join(words)}: `bench step --against nanogpt=DIR`, with a clone in DIR")
    return clones
