"""Train your own nn.Module: an LSTM on bytes, with its own loss, on any data-parallel layout.

    python examples/custom_module.py [parallel.zero=3 cluster.workers=2 key=value ...]

Pass two functions to `rt.train`. `model(config)` returns an `nn.Module` that takes int64 tokens [batch, time].
`loss(output, targets)` returns the *sum* of the losses over the valid targets, as a scalar. The platform divides by the
number of valid tokens of the global batch, so that the result does not depend on how samples are split over workers.
For the same reason dropout derives its random bits from the step and the sample, not from the worker.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

import raytrain_hpc as rt


class ByteLstm(nn.Module):
    """Model that predicts the next byte from the previous ones."""

    def __init__(self, hidden: int, layers: int, dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(256, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(self.dropout(states))


def build(config: rt.Config) -> nn.Module:
    """Build the model. Its sizes may come from the config or from anywhere else."""
    return ByteLstm(config.model.hidden_size, config.model.num_layers, config.model.dropout)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy summed over the targets; -100 marks targets to ignore."""
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-100, reduction="sum")


def main(words: list[str]) -> None:
    settings = ["run.name=byte_lstm", "model.hidden_size=128", "model.num_heads=1", "model.num_layers=2"]
    settings += ["model.dropout=0.1", "train.steps=200", "optimizer.lr=3e-3", "train.micro_batch_size=4"]
    config = rt.load_config(None, [*settings, *words])
    result = rt.train(config, model=build, loss=loss)
    print(f"{result.outcome}: {result.steps} steps, validation loss {result.val_loss:.3f} nats per byte")
    print(f"torch {torch.__version__}; checkpoint {result.checkpoint}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except rt.RaytrainError as error:
        sys.exit(f"error: {error}")
