"""Collectives of GPU tensors through host memory and gloo: NCCL does not support two ranks on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


class StagedWork:
    """A transfer to host memory; `wait` copies the data to the device."""

    def __init__(self, work: Any, host: Tensor, device: Tensor | None):
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        if self._device is not None:
            self._device.copy_(self._host)


@contextmanager
def stage_collectives() -> Iterator[None]:
    """Route the transfers of context parallelism through host memory."""
    batch_isend_irecv, all_to_all_single = dist.batch_isend_irecv, dist.all_to_all_single

    def staged_batch(ops: list[dist.P2POp]) -> list[StagedWork]:
        hosts = [op.tensor.cpu() for op in ops]
        host_ops = [dist.P2POp(op.op, host, op.peer, op.group) for op, host in zip(ops, hosts, strict=True)]
        works = zip(batch_isend_irecv(host_ops), hosts, ops, strict=True)
        return [StagedWork(work, host, op.tensor if op.op is dist.irecv else None) for work, host, op in works]

    def staged_all_to_all(
        received: Tensor, sent: Tensor, incoming: Any, outgoing: Any, group: Any, async_op: bool
    ) -> None:
        host = received.cpu()
        all_to_all_single(host, sent.cpu(), incoming, outgoing, group=group)
        received.copy_(host)

    with mock.patch.multiple(dist, batch_isend_irecv=staged_batch, all_to_all_single=staged_all_to_all):
        yield
