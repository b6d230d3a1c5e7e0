"""Averaged weights in a checkpoint, under the names of the weights."""

from __future__ import annotations

import re
from dataclasses import replace

from raytrain_hpc.checkpoint.manifest import Checkpoint
from raytrain_hpc.state.shard_index import StateIndex, TensorSlices

_PATTERN = re.compile(r"callbacks\.[^.]+\.averaged_weights\.(.+)")  # a ParameterState of a callback: `rt.EMA` has one


def select_averaged_weights(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with averaged weights in place of the trained ones; as it is if it has none."""
    sources = {f"model.{match[1]}": name for name in checkpoint.index if (match := _PATTERN.fullmatch(name))}
    if not sources:
        return checkpoint
    index = {name: checkpoint.index[sources.get(name, name)] for name in checkpoint.index}
    slices = (TensorSlices(name, t.shape, t.dtype, t.boxes) for name, t in index.items())
    locations = {name: checkpoint.locations[sources.get(name, name)] for name in checkpoint.locations}
    return replace(checkpoint, index=StateIndex(slices), locations=locations)
