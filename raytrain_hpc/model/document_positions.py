"""Positions of tokens in rows that hold several documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_document_positions(documents: Tensor) -> Tensor:
    """Return the offset of each position from the start of its document, int64 [b, t], from document numbers."""
    positions = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    is_start = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return positions - torch.where(is_start, positions, 0).cummax(dim=1).values
