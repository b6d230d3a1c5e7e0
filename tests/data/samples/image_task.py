"""A small classifier on synthetic images, as a user would write it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from raytrain_hpc import Callback, Config

SIZE = 41  # not a multiple of any batch size


class Images(Dataset[dict[str, Any]]):
    """Images of 3 x 8 x 8 whose mean color depends on the class, with random flips, noise and crops."""

    def __init__(self, size: int = SIZE, seed: int = 0, augment: bool = True):
        self._size, self._seed, self._augment = size, seed, augment

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(self._seed * 1000 + index)
        label = index % 4
        image = torch.randn(3, 8, 8, generator=generator) + label - 1.5
        if self._augment:
            if random.random() < 0.5:
                image = image.flip(-1)
            image = image + 0.1 * torch.randn(3, 8, 8) + float(np.random.rand())
        return {"image": image, "label": label, "index": index, "name": f"image {index}"}


class Classifier(nn.Module):
    def __init__(self, width: int = 16):
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(width * 36, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.conv(images)).flatten(1)))


def build(config: Config) -> nn.Module:
    return Classifier()


def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the sum over the samples."""
    return F.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")


def weighted_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return a sum and a count that is not the number of samples: class 3 does not count."""
    counted = batch["label"] < 3
    losses = F.cross_entropy(model(batch["image"]), batch["label"], reduction="none")
    return (losses * counted).sum(), counted.sum()


class Ledger(Callback):
    """Write the indexes of every committed step: they are read from the batches that the loss sees."""

    seen: list[list[int]] = []

    def pre_step(self) -> None:
        self.seen.clear()

    def post_commit(self, metrics: dict[str, Any]) -> None:
        path = self.context.run_dir / "ledger" / f"{self.context.step:05d}-{self.context.rank}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{self.context.world_size} {self.seen}")


def recording_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    if model.training and batch["index"].tolist() not in Ledger.seen[-1:]:  # padding repeats a microbatch
        Ledger.seen.append(batch["index"].tolist())
    return loss(model, batch)
