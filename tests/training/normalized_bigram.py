"""A small model whose forward passes change buffers."""

from __future__ import annotations

from torch import Tensor, nn

from raytrain_hpc import Config


class NormalizedBigram(nn.Module):
    """A bigram model with running statistics."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2))


def build_normalized_bigram(config: Config) -> NormalizedBigram:
    return NormalizedBigram(int(config.model.vocab_size), config.model.hidden_size)
