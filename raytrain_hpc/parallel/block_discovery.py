"""Find the repeated blocks of a module: the units of sharding, activation checkpointing and compilation."""

from __future__ import annotations

from torch import nn


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the members of the `nn.ModuleList` or `nn.Sequential` with the most parameters; [] if there is none.

    Members without parameters are left out.
    """
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    if not lists:
        return []
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    return [block for block in largest if next(block.parameters(), None) is not None]
