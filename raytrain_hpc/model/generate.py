"""Sample tokens from a model, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from raytrain_hpc.errors import ConfigError, DataError


def generate(
    model: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    context_length: int,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Iterator[int]:
    """Yield `max_new_tokens` tokens that continue a prompt, sampled from the logits at the last position.

    model: maps tokens int64 [1, t] on `device` to logits [1, t, vocab_size]; gets at most the last `context_length`
    tokens. A Decoder applies no dropout in either mode, since it gets no keys. temperature: 0 takes the most likely
    token. top_k: sample from the k most likely tokens (None or 0: all). seed: the same seed gives the same tokens.
    Raises DataError for an empty prompt and ConfigError for an invalid setting, both before the first token.
    """
    if not prompt:
        raise DataError("prompt: needs at least one token")
    if context_length < 1:
        raise ConfigError("context_length", context_length, "", "needs at least 1 token")
    if temperature < 0:
        raise ConfigError("temperature", temperature, "", "needs 0 or more")
    if top_k is not None and top_k < 0:
        raise ConfigError("top_k", top_k, "", "needs 0 (all tokens) or more")
    return _sample_tokens(model, list(prompt), max_new_tokens, context_length, temperature, top_k or 0, seed, device)


def _sample_tokens(
    model: Callable[[Tensor], Tensor],
    tokens: list[int],
    max_new_tokens: int,
    context_length: int,
    temperature: float,
    top_k: int,
    seed: int,
    device: torch.device | str,
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(max_new_tokens):
        # Enter no_grad for each token: around the yield, it would disable gradients in the caller's code.
        with torch.no_grad():
            window = torch.tensor([tokens[-context_length:]], device=device)
            # Sample on CPU, so that one seed gives the same tokens on any device.
            token = _sample_token(model(window)[0, -1].float().cpu(), temperature, top_k, generator)
        tokens.append(token)
        yield token


def _sample_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Sample one token from logits fp32 [vocab_size]."""
    if temperature == 0:
        return int(logits.argmax())
    if 0 < top_k < logits.numel():
        threshold = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
