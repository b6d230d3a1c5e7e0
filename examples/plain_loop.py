"""A plain PyTorch training loop: a small network that learns a function, on one device.

    python examples/plain_loop.py

examples/attached_loop.py is the same loop with the five lines that make it run on any number of workers.
"""

from __future__ import annotations

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 48 samples, which depend only on the step."""
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.prod(dim=1, keepdim=True).tanh() + inputs[:, :1]


for step in range(200):
    inputs, targets = batch(step)
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"step {step + 1} loss {loss.item():.9f}")
