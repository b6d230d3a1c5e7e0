"""The Euclidean norm over all gradients, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

Region = tuple[slice, ...] | None  # of a rank's slice; None: all of it


class GradientNorm:
    """Counts every global element once: of what several ranks hold, the first of them counts it.

    `regions` names what this rank counts of each gradient, `group` the ranks that hold one whole state together (None:
    this rank alone). Squares are added in fp64 across tensors and ranks, so that the norm depends on the layout by
    rounding only.
    """

    def __init__(self, regions: Mapping[str, Sequence[Region]], group: dist.ProcessGroup | None, device: torch.device):
        self._regions, self._group, self._device = regions, group, device

    def __call__(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm, an fp64 scalar, of gradients by parameter name."""
        counted = [
            gradient if region is None else gradient[region]
            for name, gradient in gradients.items()
            for region in self._regions.get(name, ())
        ]
        if counted:
            total = torch.stack(torch._foreach_norm(counted)).double().square().sum()
        else:
            total = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        return total.sqrt()
