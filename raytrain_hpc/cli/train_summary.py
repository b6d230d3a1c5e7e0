"""What a finished `raytrain-hpc train` prints: a sample of text, the figures, the paths, the next command to type."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.dataset.sources import STDLIB

if TYPE_CHECKING:
    from raytrain_hpc.driver.result import Result


def format_sample(config: Config, result: Result) -> Iterator[str]:
    """A sample of the model's own text, where the run has a tokenizer."""
    run_dir = Path(config.run.dir)
    if result.outcome != "done" or not config.observe.sample_tokens or not (run_dir / "tokenizer.json").exists():
        return
    if result.checkpoint is None:
        return
    from raytrain_hpc.text_generation import generate

    yield "sample of the model's own text:"
    text = "".join(generate(run_dir, max_tokens=config.observe.sample_tokens))
    for line in text.splitlines():
        yield f"  | {line}"


def format_summary(config: Config, result: Result) -> Iterator[str]:
    """Figures, paths, and what to type next."""
    if result.outcome == "stopped":
        yield f"stopped at step {result.steps} of {config.train.steps}; saved in {_display_path(config, result)}"
        yield "next: the same command goes on from there"
        return
    losses = [f"train loss {result.train_loss:.4f}" if result.train_loss is not None else ""]
    losses.append(f"validation loss {result.val_loss:.4f}" if result.val_loss is not None else "")
    figures = ", ".join(part for part in losses if part)
    yield f"done: {result.steps} steps, {result.tokens:,} tokens, {result.wall_s:.0f} s" + (
        f"; {figures} nats a token" if figures else ""
    )
    run_dir = config.run.dir
    yield f"  metrics      {run_dir}/metrics.jsonl"
    if config.observe.tensorboard:
        yield f"  tensorboard  tensorboard --logdir {run_dir}/tb"
    if result.checkpoint:
        yield f"  checkpoint   {_display_path(config, result)}"
    prompt = ' --prompt "def "' if config.data.path == STDLIB and not config.data.sources else ""
    yield f"next: raytrain-hpc generate {run_dir}{prompt}"


def _display_path(config: Config, result: Result) -> Path | None:
    """The checkpoint's path as the user gave it."""
    if result.checkpoint is None:
        return None
    return Path(config.run.dir) / "checkpoints" / Path(result.checkpoint).name
