"""Text generation from a run's checkpoint, in this process and without Ray."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from raytrain_hpc.checkpoint.averaged_weights import select_averaged_weights
from raytrain_hpc.checkpoint.merge_lora import read_merged_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.data.tokenizer.base import Tokenizer
from raytrain_hpc.data.tokenizer.registry import tokenizer_from_json
from raytrain_hpc.driver.run_directory import RunDirectory, check_holds_run, read_run_directory
from raytrain_hpc.errors import CheckpointError, DataError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.generate import generate as sample_tokens
from raytrain_hpc.state.sharded_state import ShardedState, StateShard

_MIN_PARALLEL_WORK = 1_000_000_000  # multiplications, which take a core 20 ms


def generate(
    run_dir: str | Path,
    prompt: str | None = None,
    *,
    max_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    seed: int = 0,
    step: int | str | None = None,
    weights: Literal["averaged", "trained"] = "averaged",
) -> Iterator[str]:
    """Continue `prompt` with at most `max_tokens` sampled tokens, yielded as pieces of text.

    The default prompt is that of `find_default_prompt`.
    Uses the checkpoint of a step or label, by default the newest valid one, with the weights that a callback such as
    `EMA` has averaged, if there are any and `weights` is not "trained". Raises CheckpointError if the run has no such
    checkpoint of the built-in decoder, and DataError if it has no tokenizer or the tokenizer cannot encode the prompt.
    """
    directory = read_run_directory(run_dir)
    tokenizer = _load_tokenizer(directory)
    model, seq_len = load_model(directory, step, weights)
    text = _choose_prompt(tokenizer) if prompt is None else prompt
    prompt_ids = [int(i) for i in tokenizer.encode(text)] or [0]
    sampled_ids: list[int] = []
    yielded = ""

    num_threads = choose_num_threads(sum(weight.numel() for weight in model.parameters()) * seq_len)

    def predict(tokens: Tensor) -> Tensor:
        with _limit_threads(num_threads):
            logits: Tensor = model(tokens)
        # The model's vocabulary can be larger than the tokenizer's, which cannot decode the ids beyond its own.
        return logits[..., : tokenizer.vocab_size]

    for token in sample_tokens(
        predict, prompt_ids, max_tokens, context_length=seq_len, temperature=temperature, top_k=top_k, seed=seed
    ):
        sampled_ids.append(token)
        text = tokenizer.decode(sampled_ids)
        if text.endswith("\ufffd"):  # a multi-byte character is not complete yet
            continue
        yield text[len(yielded) :]
        yielded = text


def choose_num_threads(multiplications: int) -> int:
    """Return the number of threads for a forward pass on the CPU with this number of multiplications.

    Threads wait for each other after every operation: in a small model, and on busy CPUs, that takes most of the time.
    """
    return 1 if multiplications < _MIN_PARALLEL_WORK else count_usable_cpus()


@contextmanager
def _limit_threads(limit: int) -> Iterator[None]:
    """Let torch use at most `limit` threads within the context."""
    previous = torch.get_num_threads()
    torch.set_num_threads(min(previous, limit))
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def find_default_prompt(directory: RunDirectory) -> str:
    """Return a line break, or the text of token 0 if the tokenizer of the run has none. Raises DataError."""
    return _choose_prompt(_load_tokenizer(directory))


def _choose_prompt(tokenizer: Tokenizer) -> str:
    try:
        tokenizer.encode("\n")
    except DataError:  # a char tokenizer has only the characters of its text
        return tokenizer.decode([0])
    return "\n"


def _load_tokenizer(directory: RunDirectory) -> Tokenizer:
    if not directory.tokenizer.exists():
        check_holds_run(directory)
        raise DataError(f"{directory.location}: the run has no tokenizer (synthetic tokens have none)")
    try:
        data = json.loads(directory.tokenizer.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{directory.tokenizer}: cannot be read ({error}); resume the run to write it again") from error
    return tokenizer_from_json(data)


def load_model(
    directory: RunDirectory,
    step: int | str | None = None,
    weights: Literal["averaged", "trained"] = "averaged",
) -> tuple[Decoder, int]:
    """Load the decoder of a checkpoint and return it and its train.seq_len. Arguments as of `generate`.

    Raises CheckpointError if there is no such checkpoint, or if it holds a custom model.
    """
    checkpoint = CheckpointStore(directory.checkpoints).find(step)
    if checkpoint is None:
        raise CheckpointError(f"{directory.location}: no valid checkpoint; train first")
    if checkpoint.meta["model"] is None:
        raise CheckpointError(f"{checkpoint.path}: holds a custom model; see raytrain_hpc.load_weights")
    spec = ModelSpec.from_json(checkpoint.meta["model"])
    dtype = torch.float64 if checkpoint.meta["dtype"] == "fp64" else torch.float32
    with torch.device("meta"):
        model = Decoder(spec).to(dtype)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    # The second name of a tied weight has no entry in a checkpoint; a router's bias (a buffer) has one.
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    shards = [
        StateShard.from_tensor(f"model.{name}", tensors[name].detach())
        for name in model.state_dict()
        if name in tensors
    ]
    source = select_averaged_weights(checkpoint) if weights == "averaged" else checkpoint
    read_merged_state(source, ShardedState(shards))
    return model.eval(), int(checkpoint.meta["seq_len"])
