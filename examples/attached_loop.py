"""examples/plain_loop.py, made elastic and fault-tolerant on any number of workers; the lines that differ are numbered.

    raytrain-hpc run examples/attached_loop.py train.steps=200 cluster.workers=3

Started with plain `python`, the script trains in one process like examples/plain_loop.py.
"""

from __future__ import annotations

import torch
from torch import nn

import raytrain_hpc as rt  # 1

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 48 samples, which depend only on the step."""
    inputs = torch.randn(48, 8, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.prod(dim=1, keepdim=True).tanh() + inputs[:, :1]


run = rt.attach(model, optimizer, scheduler)  # 2
for step in run.steps(200):  # 3
    inputs, targets = run.local_batch(batch(step))  # 4
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss = run.backward(loss)  # 5
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    print(f"step {step + 1} loss {loss.item():.9f}")
