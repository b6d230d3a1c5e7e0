"""Private names of torch's process groups that the package uses. The rules are those of torch_private.py."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def dump_flight_recorder() -> str:
    """Return the flight recorder's entries as JSON, for all backends. `_dump_fr_trace_json`: all versions."""
    import torch._C._distributed_c10d as c10d

    trace: str = c10d._dump_fr_trace_json(True, False)  # type: ignore[attr-defined]
    return trace


def abort_accelerator_groups() -> None:
    """Abort all NCCL and RCCL groups of this process, from any thread. Their kernels end and leave undefined tensors.

    Groups of XCCL stay as they are: aborting one hangs.

    The public `ProcessGroup.abort` is for one group, and one at a time can deadlock (pytorch issue 119797). `_world`:
    all versions. `_group_start`: the class that `nccl` names up to 2.14. The one that it names in 2.15 lacks it, and
    torch itself aborts its groups between `_start_coalescing` and `_end_coalescing`.
    """
    if not dist.is_initialized():
        return
    groups = [group for group, (backend, _) in dist.distributed_c10d._world.pg_map.items() if backend == "nccl"]
    if groups:
        device = torch.device("cuda")
        backend: Any = groups[0]._get_backend(device)
        has_group_calls = hasattr(backend, "_group_start")
        if has_group_calls:
            backend._group_start()
        else:
            groups[0]._start_coalescing(device)
        for group in groups:
            group.abort()
        if has_group_calls:
            backend._group_end()
        else:
            groups[0]._end_coalescing(device)


def has_reconfigure() -> bool:
    """Return whether process groups can be reconfigured. `_reconfigure`: 2.14 on."""
    return hasattr(dist, "_reconfigure")


def get_reconfigure_handle() -> str:
    """Return what other ranks need to reach this one. `_get_reconfigure_handle`: 2.14 on."""
    handle: str = dist._get_reconfigure_handle()  # type: ignore[attr-defined]
    return handle


def reconfigure(number: int, handles: Sequence[str], timeout: timedelta) -> None:
    """Form the default group anew from the ranks with these handles, in this order. `_reconfigure`: 2.14 on.

    `number`: another one each time. Raises RuntimeError if a rank does not answer within `timeout`.
    """
    dist._reconfigure(uuid=number, handles=list(handles), timeout=timeout).wait()  # type: ignore[attr-defined]
