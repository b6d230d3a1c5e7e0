"""`raytrain-hpc prepare`: tokenize text into token shards."""

from __future__ import annotations

import sys
from typing import Any

import click

from raytrain_hpc.cli.options import print_errors_on_one_line


@click.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, help="Directory to write.")
@click.option(
    "--tokenizer",
    default="byte",
    show_default=True,
    help="byte, char, tiktoken:FILE, hf:PATH (tokenizer.json or its folder) or bpe:VOCAB_SIZE (trained on the input).",
)
@click.option(
    "--val-fraction", default=0.1, show_default=True, help="Fraction of the data, from its end, used for validation."
)
@click.option("--shard-tokens", default=1 << 26, show_default=True, help="Tokens per shard.")
@click.option("--field", help="Field or column with the text, in .jsonl and .parquet files.  [default: text]")
@click.option("--prompt-field", help="For pairs: field of the prompt, which gets no loss.")
@click.option("--response-field", help="For pairs: field of the response, which gets the loss.")
@click.option("--engine", default="auto", show_default=True, help="local, ray, or auto: ray for large inputs.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes or Ray tasks at a time.  [default: all CPUs]")
@click.option("--address", help="Ray cluster to use.  [default: $RAY_ADDRESS, else start Ray]")
@print_errors_on_one_line
def prepare(inputs: tuple[str, ...], out: str, **options: Any) -> None:
    """Tokenize text, JSONL and Parquet (also .gz, .zst) from files, folders and glob patterns into token shards."""
    from rich.progress import Progress

    from raytrain_hpc.data.dataset.inspect import format_prepare_summary
    from raytrain_hpc.data.preprocess.prepare import prepare as write_dataset

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("preparing", total=None)
        manifest = write_dataset(
            list(inputs),
            out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **options,
        )
    for line in format_prepare_summary(manifest):
        click.echo(line)
    click.echo(f"next: raytrain-hpc train data.path={out}")
