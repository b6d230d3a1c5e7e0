"""`raytrain-hpc export`: write a checkpoint as a Hugging Face model."""

from __future__ import annotations

from typing import Literal

import click

from raytrain_hpc.cli.options import POSITIVE_FLOAT, WEIGHTS, StepOrLabel, print_errors_on_one_line


@click.command()
@click.argument("run_dir")
@click.option("--out", required=True, help="Directory to write.")
@click.option("--step", type=StepOrLabel(), help="Step or label of the checkpoint.  [default: the newest valid one]")
@click.option("--weights", default="averaged", type=WEIGHTS, help="Averages of a callback, if there are any, or not.")
@click.option("--dtype", help="float32, bfloat16, float16 or float64.  [default: as the checkpoint]")
@click.option(
    "--shard-gib", default=4.0, show_default=True, type=POSITIVE_FLOAT, help="Maximum size of a weight file, in GiB."
)
@print_errors_on_one_line
def export(
    run_dir: str,
    out: str,
    step: int | str | None,
    weights: Literal["averaged", "trained"],
    dtype: str | None,
    shard_gib: float,
) -> None:
    """Export the model of a run to Hugging Face format: safetensors, config.json, tokenizer files."""
    from raytrain_hpc.huggingface.exporter import export_model

    exported = export_model(run_dir, out, step=step, weights=weights, dtype=dtype, shard_bytes=int(shard_gib * 2**30))
    tokenizer = (
        "with its tokenizer"
        if exported.has_tokenizer
        else "without a tokenizer: the run's tokenizer has no Hugging Face format"
    )
    click.echo(f"step {exported.step} as a {exported.family} model in {len(exported.weight_files)} files, {tokenizer}")
    click.echo(f'next: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
