"""Imports of a rank: a run that uses neither the compiler nor distributed tensors does not load them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_pool import SMALL_OVERRIDES

HEAVY = ["torch._dynamo", "torch.distributed.tensor", "torch.distributed.fsdp", "sympy", "ray"]
SCRIPT = f"""
import sys
import torch.distributed as dist
import raytrain_hpc as rt
from raytrain_hpc.parallel.ddp import AllReduceBucket, DDPSync
from torch import nn
rt.train(rt.load_config(None, sys.argv[1:]), quiet=True)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parameters = {{0: dict(nn.Linear(2, 2).named_parameters())}}
DDPSync(parameters, lambda members: AllReduceBucket(members, dist.group.WORLD), 1)
dist.destroy_process_group()
print([name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize("deterministic", ["false", "true", "elastic"])
def test_plain_training_loads_neither_compiler_nor_distributed_tensors(deterministic: str, tmp_path: Path) -> None:
    words = [
        *SMALL_OVERRIDES,
        "cluster.workers=0",
        f"train.deterministic={deterministic}",
        f"run.dir={tmp_path / 'run'}",
    ]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "[]"
