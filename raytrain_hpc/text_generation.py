"""Text from the newest checkpoint of a run, in this process, with no Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from raytrain_hpc.checkpoint.merge_lora import read_merged_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.data.tokenizer.base import Tokenizer
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import CheckpointError, DataError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.generate import generate as sample_tokens
from raytrain_hpc.state.sharded_state import ShardedState, StateShard


def generate(
    run_dir: str | Path,
    prompt: str = "\n",
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    step: int | None = None,
) -> Iterator[str]:
    """Continue `prompt` with up to `max_tokens` tokens sampled from the newest valid checkpoint, or that of `step`, in
    pieces of text.

    Raises CheckpointError where the run has no checkpoint of the platform's decoder, DataError where it has no
    tokenizer or the prompt has a character that the tokenizer does not know.
    """
    directory = RunDirectory(Path(run_dir))
    tokenizer = _load_tokenizer(directory)
    model, context = load_model(directory, step)
    ids = [int(i) for i in tokenizer.encode(prompt)] or [0]
    made: list[int] = []
    shown = ""
    for token in sample_tokens(
        model, ids, max_tokens, context_length=context, temperature=temperature, top_k=top_k, seed=seed
    ):
        made.append(token)
        text = tokenizer.decode(made)
        if text.endswith("\ufffd"):  # a character of several bytes is not complete yet
            continue
        yield text[len(shown) :]
        shown = text


def _load_tokenizer(directory: RunDirectory) -> Tokenizer:
    if not directory.path.is_dir():
        raise CheckpointError(f"{directory.path}: no such run directory")
    if not directory.tokenizer.exists():
        raise DataError(f"{directory.path}: the run has no tokenizer (synthetic tokens have none)")
    try:
        plain = json.loads(directory.tokenizer.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{directory.tokenizer}: cannot be read ({error}); train on to write it again") from error
    return tokenizer_from_json(plain)


def load_model(directory: RunDirectory, step: int | None = None) -> tuple[Decoder, int]:
    """The decoder of a run's newest valid checkpoint, or that of `step`, and its seq_len. Raises CheckpointError where
    there is none."""
    store = CheckpointStore(directory.checkpoints)
    newest = store.find_newest_valid(lambda path, reason: None) if step is None else store.verify(step)
    if newest is None:
        raise CheckpointError(f"{directory.path}: no valid checkpoint; train first")
    if newest.meta["model"] is None:
        raise CheckpointError(f"{newest.path}: a module of the caller's own; load it with that module")
    shape = ModelSpec(**newest.meta["model"])
    dtype = torch.float64 if newest.meta["dtype"] == "fp64" else torch.float32
    with torch.device("meta"):
        model = Decoder(shape).to(dtype)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    # A second name of a tied weight is no entry of its own; a router's bias is.
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    held = [
        StateShard.from_tensor(f"model.{name}", named[name].detach()) for name in model.state_dict() if name in named
    ]
    read_merged_state(newest, ShardedState(held))
    return model.eval(), int(newest.meta["seq_len"])
