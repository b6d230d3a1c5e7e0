"""`raytrain-hpc import-dcp`: import a torch.distributed.checkpoint directory of torchtitan."""

from __future__ import annotations

from typing import Literal

import click

from raytrain_hpc.cli.options import CONFIG_WORDS, ConfigCommand, print_errors_on_one_line, split_words


@click.command("import-dcp", cls=ConfigCommand)
@click.argument("dcp_dir")
@click.argument("run_dir")
@click.argument("words", nargs=-1, type=CONFIG_WORDS)
@click.option("--params", help="JSON file with the model's arguments: params.json of Meta, or those of torchtitan.")
@click.option("--tokenizer", help="byte, hf:PATH (tokenizer.json or its folder) or tiktoken:FILE.  [default: none]")
@click.option(
    "--rotary-layout",
    default="auto",
    show_default=True,
    type=click.Choice(["auto", "interleaved", "half"]),
    help="Channel pairs of a head: neighbors, or half a head apart. auto: half with normalized queries (Qwen3).",
)
@print_errors_on_one_line
def import_dcp(
    dcp_dir: str,
    run_dir: str,
    words: tuple[str, ...],
    params: str | None,
    tokenizer: str | None,
    rotary_layout: Literal["auto", "interleaved", "half"],
) -> None:
    """Import a torchtitan checkpoint (Llama 3, Qwen3), written by torch.distributed.checkpoint, as a run directory.

    WORDS give what weights do not show: a recipe or model.preset=NAME, or model.num_heads=N, model.rope_theta=X,
    model.norm_eps=X and train.seq_len=N. No pickled code is executed.
    """
    from raytrain_hpc.dcp.dcp_importer import import_dcp as import_directory

    recipe, overrides = split_words(words)
    imported = import_directory(
        dcp_dir, run_dir, overrides, recipe=recipe, params=params, tokenizer=tokenizer, rotary_layout=rotary_layout
    )
    spec = imported.model_spec
    click.echo(f"{spec.count_parameters():,} parameters, tokenizer: {imported.tokenizer_kind or 'none'}")
    click.echo(
        f"rotary positions: {imported.rotary_layout} channel pairs, base {spec.rope_theta:g}, "
        + (f"scaled by {spec.rope_factor:g}" if spec.rope_factor > 1 else "not scaled (model.rope_factor=1)")
    )
    if imported.ignored:
        click.echo(f"not imported: {', '.join(imported.ignored)}; training starts with a new optimizer state")
    click.echo(f"next: raytrain-hpc train run.init_from={run_dir}")
