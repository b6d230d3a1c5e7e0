"""Closing output of `raytrain-hpc train`: a text sample (also stored), the results, the paths, the next command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.dataset.sources import STDLIB
from raytrain_hpc.driver.run_directory import read_run_directory
from raytrain_hpc.errors import RaytrainError

if TYPE_CHECKING:
    from raytrain_hpc.driver.result import Result


def sample_text(config: Config, result: Result) -> Iterator[str]:
    """Sample text from the trained model, if the run has a tokenizer and a checkpoint; store it and yield it as lines.

    The text is appended to samples.jsonl. If sampling or storing fails, the last line says so: the run itself is done.
    """
    if result.outcome != "done" or not config.logging.sample_tokens or result.checkpoint is None:
        return
    if config.model.hf:  # transformers samples from its own models, once they are exported
        return
    from raytrain_hpc.text_generation import find_default_prompt, generate

    try:
        directory = read_run_directory(config.run.dir)
        if not directory.tokenizer.exists():
            return
        prompt = find_default_prompt(directory)
        text = "".join(generate(config.run.dir, prompt, max_tokens=config.logging.sample_tokens))
    except RaytrainError as error:
        yield f"alarm: no text was sampled: {' '.join(str(error).split())}"
        return
    yield "sample of the model's own text:"
    for line in text.splitlines():
        yield f"  | {line}"
    try:
        directory.append_sample(result.steps, prompt, text)
        directory.upload()
    except OSError as error:
        yield f"alarm: the sample was not stored: {error.strerror}"


def format_summary(config: Config, result: Result, *, is_script: bool = False) -> Iterator[str]:
    """Yield lines with the results, the paths, and the next command.

    `is_script`: a script has a loss of its own, which need not be of tokens, and no model to sample from.
    """
    if result.outcome == "stopped":
        yield f"stopped at step {result.steps} of {config.train.steps}; saved in {_display_path(config, result)}"
        yield "next: repeat the same command to resume"
        return
    losses = [f"train loss {result.train_loss:.4f}" if result.train_loss is not None else ""]
    losses.append(f"validation loss {result.val_loss:.4f}" if result.val_loss is not None else "")
    loss_text = ", ".join(part for part in losses if part)
    tokens, unit = ("", "") if is_script else (f" {result.tokens:,} tokens,", " nats per token")
    yield f"done: {result.steps} steps,{tokens} {result.wall_s:.0f} s" + (f"; {loss_text}{unit}" if loss_text else "")
    run_dir = config.run.dir
    yield f"  metrics      {run_dir}/metrics.jsonl"
    if config.logging.tensorboard:
        yield f"  tensorboard  tensorboard --logdir {run_dir}/tb"
    if result.checkpoint:
        yield f"  checkpoint   {_display_path(config, result)}"
    if is_script:
        yield f"next: raytrain-hpc report {run_dir}"
        return
    if config.model.hf:
        yield f"next: raytrain-hpc export {run_dir} --out {run_dir}/exported"
        return
    prompt = ' --prompt "def "' if config.data.path == STDLIB and not config.data.sources else ""
    yield f"next: raytrain-hpc generate {run_dir}{prompt}"


def _display_path(config: Config, result: Result) -> str | None:
    """Return the path of the checkpoint below run.dir as the user wrote it."""
    if result.checkpoint is None:
        return None
    return f"{config.run.dir}/checkpoints/{result.checkpoint.rpartition('/')[2]}"
