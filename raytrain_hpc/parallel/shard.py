"""ZeRO-1, 2, 3 and HSDP by FSDP2: state sharded by rows over dp_shard, replicated over dp_replicate.

The stage only says what is kept between the microbatches of a step:

| stage | weights gathered | gradients reduce-scattered |
| --- | --- | --- |
| 1 | once a step, kept until its last backward | once a step, after the last microbatch |
| 2 | once a step, kept until its last backward | after every microbatch |
| 3 | for every forward and backward | after every microbatch |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Sharded:
    """A module under FSDP2. `parameters` are the sharded ones (DTensors), the same objects for its whole life."""

    def __init__(self, module: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh, zero: int, dtype: str):
        policy = MixedPrecisionPolicy()
        if dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*blocks, module):
            fully_shard(part, mesh=mesh, reshard_after_forward=zero == 3, mp_policy=policy)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                # Sum, not average: the loop divides by the tokens of the global batch. Without the second call gloo
                # is asked for a pre-multiplied sum, which it does not have.
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        if not isinstance(module, FSDPModule):
            raise TypeError("fully_shard did not wrap the module")
        self._zero = zero
        self._sharded: FSDPModule = module
        self._replicated = mesh.ndim == 2
        self.forward: nn.Module = module
        self.parameters = dict(module.named_parameters())

    @contextmanager
    def microbatch(self, *, first: bool, last: bool) -> Iterator[None]:
        """Set what FSDP2 does around this microbatch's forward and backward pass."""
        if self._zero == 1:
            self._sharded.set_requires_gradient_sync(last)
        elif self._replicated:
            self._sharded.set_requires_all_reduce(last)
        if self._zero < 3:
            self._sharded.set_reshard_after_backward(last)
        self._sharded.set_is_last_backward(last)
        yield
