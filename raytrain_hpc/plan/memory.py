"""Bytes of training state a rank holds."""

from __future__ import annotations

from raytrain_hpc.plan.layout import Layout


def state_bytes(parameters: int, layout: Layout, dtype: str, optimizer: str) -> int:
    """Weights, gradients and optimizer state of one rank, in bytes.

    torch-native mixed precision (weights and gradients kept in fp32, compute copies not counted): 4 + 4 + 8 bytes a
    parameter, of which ZeRO-1 shards the optimizer and keeps full weights beside their shard, ZeRO-2 shards the
    gradients too and ZeRO-3 everything (Rajbhandari et al. 2020, arXiv 1910.02054).
    """
    width = 8 if dtype == "fp64" else 4
    moments = 2 * width if optimizer == "adamw" else 0
    shards = layout.dp_shard
    sharded = moments
    full = 0
    for stage in (2, 3):  # gradients, then weights
        if layout.zero >= stage:
            sharded += width
        else:
            full += width
    if layout.zero in (1, 2) and shards > 1:
        sharded += width  # the sharded weights that the optimizer steps, beside the gathered ones
    return full * parameters + -(-sharded * parameters // shards)
