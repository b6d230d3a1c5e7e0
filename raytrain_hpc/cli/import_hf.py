"""`raytrain-hpc import-hf`: import a Hugging Face model."""

from __future__ import annotations

import click

from raytrain_hpc.cli.options import print_errors_on_one_line


@click.command("import-hf")
@click.argument("directory")
@click.option("--out", required=True, help="Run directory to write.")
@print_errors_on_one_line
def import_hf(directory: str, out: str) -> None:
    """Import a Hugging Face model (Llama, Qwen3, Mixtral, GPT-2) as a run directory with a checkpoint of step 0."""
    from raytrain_hpc.huggingface.importer import import_model

    imported = import_model(directory, out)
    click.echo(f"{imported.model_spec.count_parameters():,} parameters, tokenizer: {imported.tokenizer_kind or 'none'}")
    data = f"raytrain-hpc prepare INPUT --out DIR --tokenizer hf:{out}/huggingface" if imported.tokenizer_kind else ""
    for line in filter(None, (f"next: {data}" if data else "", f"next: raytrain-hpc train run.init_from={out}")):
        click.echo(line)
