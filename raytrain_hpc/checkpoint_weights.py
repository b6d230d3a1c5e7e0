"""Weights of a run's checkpoint in a module of the user, in this process and without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from raytrain_hpc.checkpoint.averaged_weights import select_averaged_weights
from raytrain_hpc.checkpoint.shard_io import read_state
from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.driver.run_directory import read_run_directory
from raytrain_hpc.errors import CheckpointError, ModelError
from raytrain_hpc.state.sharded_state import TORCH_DTYPES, ShardedState, StateShard

_PREFIX = "model."


def load_weights(
    run_dir: str | Path,
    module: nn.Module,
    *,
    step: int | str | None = None,
    weights: Literal["averaged", "trained"] = "averaged",
) -> int:
    """Load the parameters and persistent buffers of a checkpoint into a module, and return the step of the checkpoint.

    `module`: as the factory of the run builds it, on any device and in any floating-point dtype. Uses the checkpoint of
    a step or label, by default the newest valid one, with the weights that a callback such as `EMA` has averaged, if
    there are any and `weights` is not "trained". Raises CheckpointError if there is no such checkpoint, and ModelError
    if names or shapes differ, before anything is changed.
    """
    directory = read_run_directory(run_dir)
    checkpoint = CheckpointStore(directory.checkpoints).find(step)
    if checkpoint is None:
        raise CheckpointError(f"{directory.location}: no valid checkpoint; train first")
    source = select_averaged_weights(checkpoint) if weights == "averaged" else checkpoint
    stored = {name: source.index[name] for name in source.index if name.startswith(_PREFIX)}
    targets = _list_tensors(module)
    _check_names_and_shapes(
        str(checkpoint.path),
        {name: tuple(tensor.shape) for name, tensor in targets.items()},
        {name.removeprefix(_PREFIX): tuple(slices.shape) for name, slices in stored.items()},
    )
    for name, tensor in targets.items():  # one by one: a second copy of all of them may not fit
        value = torch.empty(tensor.shape, dtype=TORCH_DTYPES[stored[_PREFIX + name].dtype])
        read_state(source, ShardedState([StateShard.from_tensor(_PREFIX + name, value)]))
        with torch.no_grad():
            tensor.copy_(value)
    return checkpoint.step


def _list_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; a shared one has the name that comes first."""
    named: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: named[name] for name in module.state_dict() if name in named}


def _check_names_and_shapes(
    path: str, expected: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]
) -> None:
    remedy = "build the module as the factory of the run does"
    for name in sorted(expected.keys() ^ stored.keys()):
        where = "in the module, not in the checkpoint" if name in expected else "in the checkpoint, not in the module"
        raise ModelError(f"load_weights: {path}: {name} is {where}; {remedy}")
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ModelError(
                f"load_weights: {path}: {name} is {list(stored[name])}, {list(shape)} in the module; {remedy}"
            )
