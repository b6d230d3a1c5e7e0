"""Plain data parallel: every rank holds everything, gradients are summed in buckets behind the backward pass (DDP)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Alone:
    """One rank that holds everything and has nobody to synchronise with."""

    def __init__(self, module: nn.Module):
        self.forward: nn.Module = module
        self.parameters = dict(module.named_parameters())

    def microbatch(self, *, first: bool, last: bool) -> AbstractContextManager[None]:
        """The context a forward and backward pass runs in."""
        return nullcontext()


class Replicated:
    """DDP over one group. Gradients are summed, not averaged: the loop divides by the tokens of the global batch."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, bucket_mib: int):
        self.parameters = dict(module.named_parameters())
        self._ddp = DistributedDataParallel(
            module, process_group=group, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, init_sync=False
        )
        # A lambda: DDP reads annotations of the hook as objects, and here they are strings.
        self._ddp.register_comm_hook(group, lambda g, bucket: _sum_bucket(g, bucket))
        self.forward: nn.Module = self._ddp

    @contextmanager
    def microbatch(self, *, first: bool, last: bool) -> Iterator[None]:
        """Gradients pile up locally until the last microbatch of the step: one synchronisation a step."""
        if last:
            yield
        else:
            with self._ddp.no_sync():
                yield


def _sum_bucket(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    future: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future
