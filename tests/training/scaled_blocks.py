"""A model of a user whose blocks get floating-point inputs in containers, and share a parameter with the head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from raytrain_hpc import Config


class ScaledBlock(nn.Module):
    """A residual layer of which the branch is normalized and scaled by inputs."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, scales: dict[str, list[Tensor]]) -> Tensor:
        first, second = scales["scales"]
        return x + first * self.linear(self.norm(x) * second).relu()


class ScaledBlocks(nn.Module):
    """A bigram model with residual blocks and a tied head."""

    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.table = nn.Embedding(vocab_size, width)
        self.blocks = nn.ModuleList(ScaledBlock(width) for _ in range(3))
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        scales = {"scales": [torch.linspace(0.3, 0.7, x.shape[-1]), torch.tensor(0.9)]}  # not numbers of bf16
        for block in self.blocks:
            x = block(x, scales)
        return self.head(x)


def build_scaled_blocks(config: Config) -> ScaledBlocks:
    return ScaledBlocks(int(config.model.vocab_size), config.model.hidden_size)
