"""Counts what torch's own collectives send, for axes whose collectives are FSDP2's or the loop's."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch.distributed as dist


class CollectiveCounter:
    """Elements that a rank sends in torch's own collectives, as rings send them, by group."""

    # torch 2.11 and 2.13 call the two of ZeRO by different names.
    NAMES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, int, int]] = Counter()  # by what is done, ranks of the group, the group
        self._kept = {name: getattr(dist, name) for name in ("all_reduce", *self.NAMES) if hasattr(dist, name)}
        self._inside = False

    def __enter__(self) -> CollectiveCounter:
        for name, original in self._kept.items():
            setattr(dist, name, partial(self._count, name, original))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._kept.items():
            setattr(dist, name, original)

    def _count(self, name: str, original: Any, *arguments: Any, **named: Any) -> Any:
        if not self._inside:
            sizes = [value.numel() for value in (*arguments, *named.values()) if hasattr(value, "numel")]
            size = dist.get_world_size(named.get("group"))
            elements = max(sizes) * (size - 1) // size * (2 if name == "all_reduce" else 1)
            self.sent[name.rsplit("_", 1)[0], size, id(named.get("group"))] += elements
        self._inside = True
        try:
            return original(*arguments, **named)
        finally:
            self._inside = False

    def count_by_group(self) -> Counter[int]:
        """Whatever was done in a group."""
        groups: Counter[int] = Counter()
        for (_, _, group), elements in self.sent.items():
            groups[group] += elements
        return groups

    def count_by_size(self, operation: str) -> dict[int, int]:
        """Elements of one kind of collective ("all_gather", "reduce_scatter"), by ranks of the group."""
        sizes: Counter[int] = Counter()
        for (name, size, _), elements in self.sent.items():
            sizes[size] += elements * name.startswith(operation)
        return {size: elements for size, elements in sizes.items() if elements}
