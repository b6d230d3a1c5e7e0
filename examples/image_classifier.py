"""Train a classifier on your own dataset: images with random augmentation and two named validation sets.

    python examples/image_classifier.py [cluster.workers=2 parallel.zero=3 key=value ...]

The dataset has `__len__` and `__getitem__`; here it makes images like those of CIFAR-10. `loss(model, batch)` returns
the *sum* over the samples of a batch. Augmentation may use `random`, NumPy or torch: the generators are seeded by the
number of the sample, so that it does not depend on the worker and is new in every epoch.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import raytrain_hpc as rt


class Images(Dataset):
    """Noisy images of 3 x 32 x 32; the class is the position of a bright square."""

    def __init__(self, size: int, seed: int, noise: float, augment: bool = False):
        self.size, self.seed, self.noise, self.augment = size, seed, noise, augment

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor | int]:
        label, generator = index % 10, torch.Generator().manual_seed(self.seed * self.size + index)
        image = self.noise * torch.randn(3, 32, 32, generator=generator)
        image[:, 4 + 8 * (label // 5) :, 6 * (label % 5) :][:, :6, :6] += 1.0
        return {"image": image + 0.1 * torch.randn(()) if self.augment else image, "label": label}


def build(config: rt.Config) -> nn.Module:
    layers = [nn.Conv2d(3, 16, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 7 * 7, 10)]
    return nn.Sequential(*layers)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch["image"]), batch["label"], reduction="sum")


def main(words: list[str]) -> None:
    settings = ["run.name=image_classifier", "cluster.workers=0", "train.steps=60", "train.global_batch_size=32"]
    settings += ["train.micro_batch_size=8", "eval.interval=20", "eval.samples=200", "optimizer.lr=3e-3"]
    validation = {"clean": Images(200, seed=1, noise=1.0), "noisy": Images(200, seed=2, noise=3.0)}
    data = {"dataset": Images(2000, seed=0, noise=1.0, augment=True), "val_dataset": validation}
    run = rt.start(rt.load_config(None, [*settings, *words]), model=build, loss=loss, quiet=False, **data)
    result, last = run.result(), run.metrics()[-1]
    print(f"{result.outcome}: validation loss {last['val/clean/loss']:.3f} clean, {last['val/noisy/loss']:.3f} noisy")


if __name__ == "__main__":
    main(sys.argv[1:])
