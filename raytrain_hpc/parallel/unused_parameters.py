"""Parameters of a user's module that some microbatches do not use, under FSDP2: zeros stand for their gradients.

FSDP2 reduces the gradients of a unit as one flat tensor of those parameters that have one. If they are other parameters
on another rank, or in another microbatch, gradients of different parameters are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raytrain_hpc.torch_private_fsdp import on_fsdp_post_backward


class UnusedParameters:
    """Watcher of the backward passes of FSDP2 modules, which makes every unit reduce the same parameters on all ranks.

    A parameter that no rank uses in a step has no gradient after it, as on one rank. Every unit must be used in every
    microbatch: its weights are all-gathered by all ranks together.
    """

    def __init__(self, fsdp_modules: Iterable[FSDPModule], groups: Sequence[dist.ProcessGroup]):
        """`groups`: over all of them together, ranks sum gradients."""
        self._groups = groups
        self._used: set[nn.Parameter] = set()  # those with a gradient on this rank in this step
        self._parameters = [
            parameter for module in fsdp_modules for parameter in on_fsdp_post_backward(module, self._used.add)
        ]

    def drop_gradients(self) -> None:
        """Drop the gradients of parameters that no rank has used. Call after the last backward pass. Collective."""
        if not self._parameters:
            return
        unused = [index for index, parameter in enumerate(self._parameters) if parameter not in self._used]
        num_users = torch.ones(len(self._parameters), device=self._parameters[0].device)
        num_users[unused] = 0.0
        for group in self._groups:
            dist.all_reduce(num_users, group=group)
        for index in unused:  # of the others it is known without waiting for the device
            if num_users[index].item() == 0:
                self._parameters[index].grad = None
        self._used.clear()
