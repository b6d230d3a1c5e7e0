"""Count what collectives of torch.distributed send, for axes whose collectives FSDP2 or the trainer calls."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch.distributed as dist


class CollectiveCounter:
    """A context manager that counts the elements a rank sends in collectives, as ring algorithms send them."""

    # The all-gather and reduce-scatter of FSDP2 have different names in torch 2.11 and 2.13.
    NAMES = ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single")

    def __init__(self) -> None:
        self.sent: Counter[tuple[str, int, int]] = Counter()  # by (operation, group size, id of the group)
        self._originals = {name: getattr(dist, name) for name in ("all_reduce", *self.NAMES) if hasattr(dist, name)}
        self._in_collective = False

    def __enter__(self) -> CollectiveCounter:
        for name, original in self._originals.items():
            setattr(dist, name, partial(self._count, name, original))
        return self

    def __exit__(self, *error: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    def _count(self, name: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._in_collective:
            sizes = [value.numel() for value in (*args, *kwargs.values()) if hasattr(value, "numel")]
            group_size = dist.get_world_size(kwargs.get("group"))
            elements = max(sizes) * (group_size - 1) // group_size * (2 if name == "all_reduce" else 1)
            self.sent[name.rsplit("_", 1)[0], group_size, id(kwargs.get("group"))] += elements
        self._in_collective = True
        try:
            return original(*args, **kwargs)
        finally:
            self._in_collective = False

    def count_by_group(self) -> Counter[int]:
        """Return the elements of all collectives, by group."""
        counts: Counter[int] = Counter()
        for (_, _, group), elements in self.sent.items():
            counts[group] += elements
        return counts

    def count_by_size(self, operation: str) -> dict[int, int]:
        """Return the elements of one kind of collective ("all_gather", "reduce_scatter"), by group size."""
        counts: Counter[int] = Counter()
        for (name, size, _), elements in self.sent.items():
            counts[size] += elements * name.startswith(operation)
        return {size: elements for size, elements in counts.items() if elements}
