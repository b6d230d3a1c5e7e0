"""`raytrain-hpc export`: write a checkpoint as a Hugging Face model."""

from __future__ import annotations

import click

from raytrain_hpc.cli.options import POSITIVE_FLOAT, print_errors_on_one_line


@click.command()
@click.argument("run_dir")
@click.option("--out", required=True, help="Directory to write.")
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint to write.  [default: the newest valid one]")
@click.option("--dtype", help="float32, bfloat16, float16 or float64.  [default: as the checkpoint]")
@click.option(
    "--shard-gib", default=4.0, show_default=True, type=POSITIVE_FLOAT, help="Maximum size of a weight file, in GiB."
)
@print_errors_on_one_line
def export(run_dir: str, out: str, step: int | None, dtype: str | None, shard_gib: float) -> None:
    """Export the model of a run to Hugging Face format: safetensors, config.json, tokenizer files."""
    from raytrain_hpc.huggingface.exporter import export_model

    exported = export_model(run_dir, out, step=step, dtype=dtype, shard_bytes=int(shard_gib * 2**30))
    tokenizer = (
        "with its tokenizer"
        if exported.has_tokenizer
        else "without a tokenizer: the run's tokenizer has no Hugging Face format"
    )
    click.echo(f"step {exported.step} as a {exported.family} model in {len(exported.weight_files)} files, {tokenizer}")
    click.echo(f'next: transformers.AutoModelForCausalLM.from_pretrained("{out}")')
