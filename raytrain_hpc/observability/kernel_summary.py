"""Time of each kernel or operator in a profile, and the shares of GEMM, attention, communication and idle time. Pure.

On a GPU the operations are its kernels, copies included; on a CPU they are torch's operators without those that they
call.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raytrain_hpc.device_backends import BACKENDS

GEMM, ATTENTION, COMMUNICATION, OTHER = KINDS = ("GEMM", "attention", "communication", "other")
# Parts of lower-case names, in the order in which they are tried. Inductor names its pointwise and reduction kernels
# after neighboring operations too, and nodes of autograd are named after the operators that they call. Kernels of
# attention are also named after the library that they are built with.
_PARTS_OF_NAMES = {
    OTHER: ("triton_poi_", "triton_red_", "triton_per_", "autograd::", "backward0"),
    COMMUNICATION: (
        *(backend.process_group for backend in BACKENDS.values()),
        "oneapi::ccl",
        "c10d::",
        "c10d_functional::",
    ),
    ATTENTION: ("flash", "fmha", "sdpa", "attention", "attn"),
    GEMM: (
        "gemm",
        "nvjet",
        "cutlass",
        "xmma",
        "::mm",
        "::addmm",
        "::bmm",
        "::baddbmm",
        "_mm",
        "_addmm",
        "_bmm",
        "linear_pointwise",
    ),
}


@dataclass(frozen=True)
class ProfiledEvent:
    """One execution of an operation. `self_us`: its time without the operations that it calls, in microseconds."""

    name: str
    start_us: float
    end_us: float
    self_us: float


@dataclass(frozen=True)
class OperationTime:
    """All executions of the operations of one name. `kind`: one of `KINDS`. `seconds`: their self time, added up."""

    name: str
    kind: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class KernelSummary:
    """Operations of a profile, the longest first.

    `device`: type of the device that executed them. `window_s`: from the start of the first to the end of the last.
    `idle_s`: time within that in which none was executed.
    """

    device: str
    window_s: float
    idle_s: float
    operations: tuple[OperationTime, ...]

    @property
    def busy_s(self) -> float:
        """Time of all operations, added up. Exceeds the window if operations overlap."""
        return sum(operation.seconds for operation in self.operations)

    @property
    def idle_share(self) -> float:
        """Share of the window in which no operation was executed."""
        return self.idle_s / self.window_s if self.window_s else 0.0

    def compute_share(self, kind: str) -> float:
        """Return the share of the operations of a kind in the time of all operations."""
        seconds = sum(operation.seconds for operation in self.operations if operation.kind == kind)
        return seconds / self.busy_s if self.busy_s else 0.0

    def list_names(self, kind: str) -> list[str]:
        """Return the names of the operations of a kind, the longest first."""
        return [operation.name for operation in self.operations if operation.kind == kind]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        operations = [
            {"name": operation.name, "kind": operation.kind, "calls": operation.calls, "seconds": operation.seconds}
            for operation in self.operations
        ]
        facts = {"device": self.device, "window_s": self.window_s, "idle_s": self.idle_s}
        return facts | {"operations": operations}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KernelSummary:
        """Create a summary from the result of `to_json`. Raises KeyError or TypeError for anything else."""
        operations = tuple(OperationTime(**operation) for operation in data["operations"])
        return cls(str(data["device"]), float(data["window_s"]), float(data["idle_s"]), operations)


def classify_operation(name: str) -> str:
    """Return the kind of an operation by its name."""
    lower = name.lower()
    for kind, parts in _PARTS_OF_NAMES.items():
        if any(part in lower for part in parts):
            return kind
    return OTHER


def summarize_events(device: str, events: Iterable[ProfiledEvent]) -> KernelSummary:
    """Return the summary of the operations that a device has executed."""
    events = list(events)
    self_us: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    for event in events:
        self_us[event.name] += event.self_us
        calls[event.name] += 1
    operations = [OperationTime(name, classify_operation(name), calls[name], us / 1e6) for name, us in self_us.items()]
    window_us = max((event.end_us for event in events), default=0) - min(
        (event.start_us for event in events), default=0
    )
    return KernelSummary(
        device=device,
        window_s=window_us / 1e6,
        idle_s=(window_us - _measure_union(events)) / 1e6,
        operations=tuple(sorted(operations, key=lambda operation: (-operation.seconds, operation.name))),
    )


def _measure_union(events: Iterable[ProfiledEvent]) -> float:
    """Return the microseconds in which at least one event lasts."""
    union_us, covered_until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event.start_us):
        union_us += max(0.0, event.end_us - max(event.start_us, covered_until))
        covered_until = max(covered_until, event.end_us)
    return union_us
