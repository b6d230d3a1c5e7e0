"""Find the repeated blocks of a module: the units of sharding, activation checkpointing and compilation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from raytrain_hpc.model.decoder import Decoder


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the layers of a decoder, or the members of another module's largest list; [] if there is none.

    The largest is the `nn.ModuleList` or `nn.Sequential` with the most parameters. Members without parameters are left
    out, and one that is used several times is returned once.
    """
    if isinstance(module, Decoder):
        return list(module.blocks().values())
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList | nn.Sequential) and len(m) > 1]
    if not lists:
        return []
    largest = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    return [block for block in dict.fromkeys(largest) if next(block.parameters(), None) is not None]


def exclude_shared(blocks: Sequence[nn.Module], module: nn.Module) -> list[nn.Module]:
    """Return the blocks without those that are used several times, or share a parameter with the rest of the module."""
    num_paths = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    return [
        block
        for block in blocks
        if all(
            num_paths[parameter] == count
            for parameter, count in Counter(p for _, p in block.named_parameters(remove_duplicate=False)).items()
        )
    ]
