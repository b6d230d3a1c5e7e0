"""Collectives of tensors on a GPU through host memory and gloo: NCCL refuses two ranks on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor


class StagedWork:
    """A transfer whose data goes to the device when it is waited for."""

    def __init__(self, work: Any, host: Tensor, device: Tensor | None):
        self._work, self._host, self._device = work, host, device

    def wait(self) -> None:
        self._work.wait()
        if self._device is not None:
            self._device.copy_(self._host)


@contextmanager
def stage_collectives() -> Iterator[None]:
    """While it lasts, what context parallelism exchanges goes by the host."""
    exchange, spread = dist.batch_isend_irecv, dist.all_to_all_single

    def batch(ops: list[dist.P2POp]) -> list[StagedWork]:
        hosts = [one.tensor.cpu() for one in ops]
        moved = [dist.P2POp(one.op, host, one.peer, one.group) for one, host in zip(ops, hosts, strict=True)]
        landings = zip(exchange(moved), hosts, ops, strict=True)
        return [StagedWork(work, host, one.tensor if one.op is dist.irecv else None) for work, host, one in landings]

    def all_to_all(received: Tensor, sent: Tensor, incoming: Any, outgoing: Any, group: Any) -> None:
        host = received.cpu()
        spread(host, sent.cpu(), incoming, outgoing, group=group)
        received.copy_(host)

    with mock.patch.multiple(dist, batch_isend_irecv=batch, all_to_all_single=all_to_all):
        yield
