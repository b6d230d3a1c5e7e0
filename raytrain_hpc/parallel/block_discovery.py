"""Which submodules are the repeated blocks: the unit of sharding, recompute and compilation."""

from __future__ import annotations

from torch import nn


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """The members of the largest `nn.ModuleList` or `nn.Sequential`, by parameters; none where there is none."""
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    if not lists:
        return []
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    return [block for block in largest if next(block.parameters(), None) is not None]
