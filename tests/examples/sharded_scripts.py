"""Training scripts as users write them, before and after they are attached; formatted with the lines that differ."""

from __future__ import annotations

LANGUAGE_MODEL = """
import random
import numpy as np
import torch
from torch import nn
{imports}
torch.manual_seed(1337)
random.seed(1337)
np.random.seed(1337)
block_size, batch_size, accumulation, max_iters = 16, 12, 3, 12
data = torch.randint(0, 50, (4000,), generator=torch.Generator().manual_seed(1))

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 50), nn.Linear(50, width)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x)).cumsum(1) / 4))

class Model(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.table, self.head = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head.weight = self.table.weight
    def forward(self, tokens, targets):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

def get_batch():
    starts = torch.randint(len(data) - block_size, (batch_size,))
    order = np.random.permutation(batch_size)
    starts = starts[order.tolist()] + random.randint(0, 0)
    rows = torch.stack([data[i : i + block_size + 1] for i in starts])
    return rows[:, :-1], rows[:, 1:]

model = Model()
decayed = [p for p in model.parameters() if p.ndim >= 2]
others = [p for p in model.parameters() if p.ndim < 2]
groups = [{{"params": decayed, "weight_decay": 0.1}}, {{"params": others, "weight_decay": 0.0}}]
optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler("cpu", enabled=False)
{attach}
for iter_num in {steps}:
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * 0.9**iter_num
    total = 0.0
    for micro_step in range(accumulation):
        x, y = {batch}
        loss = model(x, y) / accumulation
        {backward}
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {{iter_num}} loss {{total:.9f}}", flush=True)
"""
PLAIN_PARTS = {
    "imports": "",
    "attach": "",
    "steps": "range(max_iters)",
    "batch": "get_batch()",
    "backward": "scaler.scale(loss).backward()",
}
ATTACHED_PARTS = {
    "imports": "import raytrain_hpc as rt",
    "attach": "run = rt.attach(model, optimizer, scaler=scaler)",
    "steps": "run.steps(max_iters)",
    "batch": "run.local_batch(get_batch())",
    "backward": "loss = run.backward(scaler.scale(loss))",
}

FINE_TUNING = """
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, default_data_collator, get_scheduler
{imports}
torch.manual_seed(7)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config)
rows = torch.randint(0, 64, (41, 12), generator=torch.Generator().manual_seed(2)).tolist()
train_dataset = [{{"input_ids": row, "labels": row}} for row in rows]
loader = DataLoader(train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=6, drop_last=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=18)
{attach}
model.train()
{loop}
    outputs = model(**batch)
    loss = outputs.loss
    {backward}
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"loss {{loss.item():.9f}}", flush=True)
"""
PLAIN_TUNING = {
    "imports": "",
    "attach": "",
    "loop": "for batch in (batch for epoch in range(3) for batch in loader):",
    "backward": "loss.backward()",
}
ATTACHED_TUNING = {
    "imports": "import raytrain_hpc as rt",
    "attach": "run = rt.attach(model, optimizer, scheduler)",
    "loop": "for step, batch in zip(run.steps(18), run.loader(loader)):",
    "backward": "loss = run.backward(loss)",
}

ADVERSARIAL = """
import torch
from torch import nn
import raytrain_hpc as rt
torch.manual_seed(3)
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6))
critic = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1))
optimizers = {
    "g": torch.optim.Adam(generator.parameters(), 1e-3),
    "c": torch.optim.SGD(critic.parameters(), 1e-2, momentum=0.9),
}
run = rt.attach({"g": generator, "c": critic}, optimizers)
for step in run.steps(10):
    real, noise = run.local_batch((torch.randn(12, 6) + 2, torch.randn(12, 4)))
    run.backward(nn.functional.softplus(-critic(real)).mean())
    critic_loss = run.backward(nn.functional.softplus(critic(generator(noise).detach())).mean())
    optimizers["c"].step()
    optimizers["c"].zero_grad()
    generator_loss = run.backward(nn.functional.softplus(-critic(generator(noise))).mean())
    optimizers["g"].step()
    optimizers["g"].zero_grad()
    optimizers["c"].zero_grad()
    run.log({"gan/generator": generator_loss, "gan/critic": critic_loss})
    if step == 4:
        run.save()
"""

PREFETCHING_PARTS = {
    **ATTACHED_PARTS,
    "attach": f"{ATTACHED_PARTS['attach']}\nbatches = run.loader(get_batch)\nbatch = next(batches)",
    "batch": "run.local_batch(batch)\n        batch = next(batches)",
}
PLAIN_PREFETCHING_PARTS = {
    **PLAIN_PARTS,
    "attach": "batch = get_batch()",
    "batch": "batch\n        batch = get_batch()",
}

ELASTIC = """
import random
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
import raytrain_hpc as rt

class Noisy:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        x = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand(), x.sum()

model = nn.Sequential(
    nn.Linear(6, 13), nn.BatchNorm1d(13), nn.Dropout(0.2), nn.Linear(13, 13), nn.Tanh(), nn.Linear(13, 1)
)
critic = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 5))
optimizers = {
    "model": torch.optim.AdamW(model.parameters(), 1e-2),
    "critic": torch.optim.SGD(critic.parameters(), 1e-2, momentum=0.9),
}
run = rt.attach({"model": model, "critic": critic}, optimizers)
for step, batch in zip(run.steps(9), run.loader(DataLoader(Noisy(), batch_size=12, shuffle=True, drop_last=True))):
    for x, y in run.microbatches(batch):
        run.backward((model(x + 0.1 * torch.randn_like(x)).squeeze(1) - y.float()).square().mean())
    run.log({"critic/before": run.loss})
    for x, _ in run.microbatches(batch):
        run.backward(nn.functional.softplus(critic(x)).mean() + model(x).mean() * 0.01)
    norm = run.clip_grad_norm_([*model.parameters(), *critic.parameters()], 0.7)
    run.log({"norm": norm})
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad()
    if step % 4 == 3:
        model.eval()
        with torch.no_grad():
            run.log({"running": model(torch.ones(3, 6, device=run.device)).sum()})
        model.train()
"""

EVALUATING = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import raytrain_hpc as rt

torch.manual_seed(5)
x = torch.randn(64, 5)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
train, val = torch.utils.data.random_split(data, [44, 20])
model = nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Dropout(0.1), nn.Linear(11, 1))
optimizer = torch.optim.AdamW(model.parameters(), 2e-2)
run = rt.attach(model, optimizer)
loss = lambda batch: (model(batch[0]) - batch[1]).square().mean()
for step, batch in zip(run.steps(16), run.loader(DataLoader(train, batch_size=12, shuffle=True, drop_last=True))):
    if {first} and step % 2 == 0:
        value = run.evaluate(DataLoader(val, batch_size=6, shuffle=True), loss)
        assert model.training
    for rows in run.microbatches(batch):
        run.backward(loss(rows))
    optimizer.step()
    optimizer.zero_grad()
    if not {first} and step % 2 == 1:
        run.evaluate([tuple(val[i : i + 6]) for i in range(0, 20, 6)], loss)
        run.evaluate(DataLoader(val, batch_size=20), lambda batch: (loss(batch) * 20, 20), "whole")
print("after the loop")
"""
