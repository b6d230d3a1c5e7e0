"""raytrain-hpc <verb>: thin over the Python API. Exit code 0 done, 2 wrong config or input, 3 stopped, 4 gave up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from raytrain_hpc.errors import RaytrainError

STOPPED = 3
_OF_A_SCRIPT = ("data.path=synthetic", "data.engine=local", "model.vocab_size=2")  # it brings its own data and model
_ABOVE_0 = click.FloatRange(min=0, min_open=True)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="raytrain-hpc")
def main() -> None:
    """Train language models on a Ray cluster that changes under you."""


def _one_line_errors(verb: Callable[..., None]) -> Callable[..., None]:
    @wraps(verb)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            verb(*args, **kwargs)
        except RaytrainError as error:
            click.echo(f"error: {' '.join(str(error).split())}", err=True)
            sys.exit(error.exit_code)
        except KeyboardInterrupt:
            click.echo("error: interrupted before the state was saved", err=True)
            sys.exit(4)

    return run


def _split_words(words: tuple[str, ...]) -> tuple[str | None, list[str]]:
    """[CONFIG.yaml] [key=value ...] in any order."""
    from raytrain_hpc.errors import ConfigError

    files = [word for word in words if "=" not in word]
    if len(files) > 1:
        raise ConfigError("config", files[1], "command line", f"one config file at a time; {files[0]} is given already")
    return (files[0] if files else None), [word for word in words if "=" in word]


@main.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@_one_line_errors
def train(words: tuple[str, ...]) -> None:
    """Train. With no config: a small byte-level model of the Python standard library's source text."""
    from raytrain_hpc.config.loader import load_config

    path, overrides = _split_words(words)
    config = load_config(path, overrides)
    from raytrain_hpc.api import train as run_training
    from raytrain_hpc.cli.train_summary import closing_lines, sample_lines

    result = run_training(config)
    for line in sample_lines(config, result):
        click.echo(line)
    for line in closing_lines(config, result):
        click.echo(line)
    if result.outcome == "stopped":
        sys.exit(STOPPED)


@main.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option("--workers", type=click.IntRange(min=1), help="Plan for this many workers, 8 a node.")
@click.option("--nodes", type=click.IntRange(min=1), help="Plan for this many nodes.")
@click.option("--gpus-per-node", type=click.IntRange(min=1), help="Devices of a node.  [default: 8]")
@click.option(
    "--device", help="a100, h100, h200, b200, mi300x, pvc or cpu; with numbers of your own: h100,memory_gib=64."
)
@click.option("--running", is_flag=True, help="Plan for the Ray cluster that is running.")
@click.option("--inside", default="", help="Link inside a node, as nvlink4 or pcie,gbs=20.  [default: the device's]")
@click.option("--across", default="", help="Link across nodes, as infiniband-ndr, slingshot or ethernet.")
@click.option("--tokens", type=_ABOVE_0, help="Tokens to train on.  [default: those of train.steps]")
@click.option(
    "--device-hours", default=50_000.0, show_default=True, type=_ABOVE_0, help="Hours in which a device fails once."
)
@click.option(
    "--restart-seconds", default=300.0, show_default=True, type=_ABOVE_0, help="Starting all again from a checkpoint."
)
@click.option("--measure", type=click.IntRange(min=1), help="Train the first so many on the running cluster instead.")
@click.option("--steps", default=8, show_default=True, type=click.IntRange(min=1), help="Of each, with --measure.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: all legal layouts, ranked.")
@_one_line_errors
def plan(
    words: tuple[str, ...], restart_seconds: float, measure: int | None, steps: int, as_json: bool, **options: Any
) -> None:
    """Show which layout is best and why, whether it fits, how fast it is, and what failures cost.

    Needs no cluster, torch or GPU, but with --measure. Keys of parallel and train.micro_batch also take `auto` or a
    list to choose from.
    """
    from raytrain_hpc.api import plan as make_plan
    from raytrain_hpc.cli.plan_table import plan_lines
    from raytrain_hpc.config.loader import load_config

    path, overrides = _split_words(words)
    if measure:
        from raytrain_hpc.cli.autotune import measure as measured

        trials = measured(load_config(path, overrides), measure, steps, lambda line: click.echo(line, err=True))
        for line in [json.dumps(trials.to_json(), indent=2)] if as_json else trials.lines():
            click.echo(line)
        return
    made = make_plan(load_config(path, overrides), restart_s=restart_seconds, **options)
    for line in [json.dumps(made, indent=2)] if as_json else plan_lines(made):
        click.echo(line)


@main.command()
@click.argument("script")
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@_one_line_errors
def run(script: str, words: tuple[str, ...]) -> None:
    """Run a script with a loop of its own (rt.attach) on workers: elastic, and gone on with by the same command."""
    from pathlib import Path

    from raytrain_hpc.api import run_script
    from raytrain_hpc.cli.train_summary import closing_lines
    from raytrain_hpc.config.loader import load_config

    path, overrides = _split_words(words)
    config = load_config(path, overrides, beneath=[f"run.name={Path(script).stem}", *_OF_A_SCRIPT])
    result = run_script(config, script)
    for line in closing_lines(config, result):
        click.echo(line)
    if result.outcome == "stopped":
        sys.exit(STOPPED)


@main.command()
@click.argument("inputs", nargs=-1, required=True)
@click.option("--out", required=True, help="Directory to write.")
@click.option(
    "--tokenizer",
    default="byte",
    show_default=True,
    help="byte, char, tiktoken:FILE, hf:PATH (tokenizer.json or its folder) or bpe:VOCAB_SIZE (trained on the input).",
)
@click.option("--val-fraction", default=0.1, show_default=True, help="Share of the end kept for validation.")
@click.option("--shard-tokens", default=1 << 26, show_default=True, help="Tokens a shard.")
@click.option("--field", help="Field or column with the text, in .jsonl and .parquet files.  [default: text]")
@click.option("--prompt-field", help="For pairs: the prompt, on which there is no loss.")
@click.option("--response-field", help="For pairs: the response, on which there is.")
@click.option("--engine", default="auto", show_default=True, help="local, ray, or auto: ray for large inputs.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes or Ray tasks at a time.  [default: all CPUs]")
@click.option("--address", help="Ray cluster to work on.  [default: $RAY_ADDRESS, else one of its own]")
@_one_line_errors
def prepare(inputs: tuple[str, ...], out: str, **options: Any) -> None:
    """Turn text, JSONL and Parquet (.gz, .zst too) in files, folders and patterns into token shards."""
    from rich.progress import Progress

    from raytrain_hpc.data.dataset.inspect import closing_lines
    from raytrain_hpc.data.preprocess.prepare import prepare as write_dataset

    with Progress(transient=True, disable=not sys.stdout.isatty()) as bar:
        task = bar.add_task("preparing", total=None)
        manifest = write_dataset(
            list(inputs),
            out,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
            **options,
        )
    for line in closing_lines(manifest):
        click.echo(line)
    click.echo(f"next: raytrain-hpc train data.path={out}")


@main.command()
@click.argument("directory")
@_one_line_errors
def inspect(directory: str) -> None:
    """Show what a dataset holds: counts, tokenizer, checksums, a decoded sample."""
    from raytrain_hpc.data.dataset.inspect import describe

    click.echo(describe(directory))


@main.command()
@click.argument("run_dir")
@click.option("--prompt", default="\n", help="Text to continue.")
@click.option("--max-tokens", default=200, show_default=True, type=click.IntRange(min=1))
@click.option("--temperature", default=0.8, show_default=True, type=click.FloatRange(min=0))
@click.option("--top-k", default=0, show_default=True, type=click.IntRange(min=0), help="0: all tokens.")
@click.option("--seed", default=0, show_default=True)
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint to sample from.  [default: the newest valid one]")
@_one_line_errors
def generate(run_dir: str, prompt: str, **options: Any) -> None:
    """Sample text from a run's newest checkpoint."""
    from raytrain_hpc.text_generation import generate as sample

    pieces = sample(run_dir, prompt, **options)
    first = next(pieces, "")  # whatever is wrong shows here, before half a line is printed
    click.echo(prompt + first, nl=False)
    for piece in pieces:
        click.echo(piece, nl=False)
    click.echo()


@main.command()
@click.argument("run_dir")
@_one_line_errors
def status(run_dir: str) -> None:
    """Say what a run is doing, from another shell: how far it is, what broke, what is saved."""
    from raytrain_hpc.cli.status import status_lines

    for line in status_lines(run_dir):
        click.echo(line)


@main.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option(
    "--over", multiple=True, required=True, help="key=value,value,...: what to vary; several: every combination."
)
@click.option("--at-once", default=1, show_default=True, type=click.IntRange(min=1), help="Runs side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_one_line_errors
def sweep(words: tuple[str, ...], over: tuple[str, ...], at_once: int, as_json: bool) -> None:
    """Train with several settings or layouts, in turn or side by side, and compare them in one table."""
    from raytrain_hpc.cli.sweep import sweep as run_sweep
    from raytrain_hpc.cli.sweep import table

    path, overrides = _split_words(words)
    trials = run_sweep(path, overrides, over, at_once=at_once, note=lambda line: click.echo(line, err=True))
    for line in [json.dumps([one.to_json() for one in trials], indent=2)] if as_json else table(trials):
        click.echo(line)
    if not as_json:
        click.echo(f"next: raytrain-hpc report {trials[0].run_dir.parent}/* --out sweep.html")
    if any(one.code for one in trials):
        sys.exit(4)


@main.command()
@click.argument("run_dirs", nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--out", help="File to write.  [default: report.html in the run's directory]")
@_one_line_errors
def report(run_dirs: tuple[str, ...], out: str | None) -> None:
    """Write one HTML page about a run, or about several beside each other: curves, incidents, memory, time."""
    from raytrain_hpc.run_report.writer import write_report

    click.echo(f"{write_report(run_dirs, out)}")


@main.command()
@click.argument("run_dir")
@click.option("--out", required=True, help="Directory to write.")
@click.option("--step", type=click.IntRange(min=0), help="Checkpoint to write.  [default: the newest valid one]")
@click.option("--dtype", help="float32, bfloat16, float16 or float64.  [default: as the checkpoint]")
@click.option("--shard-gib", default=4.0, show_default=True, type=_ABOVE_0, help="Largest file of weights, in GiB.")
@_one_line_errors
def export(run_dir: str, out: str, step: int | None, dtype: str | None, shard_gib: float) -> None:
    """Write a run's model for Hugging Face: safetensors, config.json, tokenizer files."""
    from raytrain_hpc.huggingface.exporter import export_model

    made = export_model(run_dir, out, step=step, dtype=dtype, shard_bytes=int(shard_gib * 2**30))
    tokenizer = "with its tokenizer" if made.tokenizer else "without a tokenizer: the run's has no such form"
    click.echo(f"step {made.step} as a {made.family} model in {len(made.files)} files, {tokenizer}")
    click.echo(f'next: transformers.AutoModelForCausalLM.from_pretrained("{out}")')


@main.command("import-hf")
@click.argument("directory")
@click.option("--out", required=True, help="Run directory to write.")
@_one_line_errors
def import_hf(directory: str, out: str) -> None:
    """Take in a Hugging Face model (Llama, Qwen3, Mixtral, GPT-2) as a run of zero steps."""
    from raytrain_hpc.huggingface.importer import import_model

    made = import_model(directory, out)
    click.echo(f"{made.shape.num_parameters():,} parameters, tokenizer: {made.tokenizer or 'none'}")
    data = f"raytrain-hpc prepare INPUT --out DIR --tokenizer hf:{out}/huggingface" if made.tokenizer else ""
    for line in filter(None, (f"next: {data}" if data else "", f"next: raytrain-hpc train run.init_from={out}")):
        click.echo(line)


@main.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option("--seed", default=0, show_default=True, help="Of the schedule.")
@click.option("--faults", default=5, show_default=True, type=click.IntRange(min=1), help="How many.")
@click.option("--workers", default=3, show_default=True, type=click.IntRange(min=2), help="Ranks they strike.")
@click.option("--compare", is_flag=True, help="With a run without faults, every bit (train.deterministic=elastic).")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_one_line_errors
def drill(words: tuple[str, ...], seed: int, faults: int, workers: int, compare: bool, as_json: bool) -> None:
    """Train with faults on purpose, and show what they cost: killed, frozen, hung, out of step, exceptions, NaN."""
    from raytrain_hpc.cli.drill import drill as run_drill
    from raytrain_hpc.config.loader import load_config

    path, overrides = _split_words(words)
    config = load_config(path, overrides)
    found = run_drill(config, seed=seed, faults=faults, world=workers, compare=compare, quiet=as_json)
    click.echo(json.dumps(found.to_json(), indent=2) if as_json else found.text())


@main.command()
@click.argument("words", nargs=-1, metavar="[CONFIG.yaml] [key=value ...]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_one_line_errors
def doctor(words: tuple[str, ...], as_json: bool) -> None:
    """Examine the cluster: nodes, versions, clocks, directories, devices, and how fast workers reach one another."""
    from raytrain_hpc.cli.doctor import doctor as examine
    from raytrain_hpc.config.loader import load_config

    path, overrides = _split_words(words)
    report = examine(load_config(path, overrides))
    for line in [json.dumps(report.to_json(), indent=2)] if as_json else report.lines():
        click.echo(line)
    if not report.fit:
        sys.exit(2)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument(
    "what",
    type=click.Choice(
        ["step", "start", "checkpoint", "prepare", "data", "watch", "recovery", "comm", "device", "snapshots"]
    ),
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=1), help="Alternating rounds.")
@_one_line_errors
def bench(what: str, as_json: bool, rounds: int) -> None:
    """Measure the platform beside a peer, alternating in one run."""
    from importlib import import_module

    table = import_module(f"raytrain_hpc.bench.{what}").run(rounds=rounds)
    click.echo(json.dumps(table.to_json(), indent=2) if as_json else table.text())


if __name__ == "__main__":
    main()
