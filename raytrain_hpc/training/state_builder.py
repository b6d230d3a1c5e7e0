"""Training state of one rank: its weights, buffers and optimizer moments as slices of global tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.optim.grad_norm import ExactGradientNorm, GradientNorm, Region
from raytrain_hpc.optim.optimizer import Optimizer
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.state.shard_index import Box, StateIndex, find_owned_regions
from raytrain_hpc.state.sharded_state import ShardedState, StateShard, get_dtype_name, get_local_slice
from raytrain_hpc.training.state_loader import NUM_UPDATES, RECENT_LOSSES


def build_state(
    model: ParallelModel,
    optimizer: Optimizer,
    recent_losses: torch.Tensor | None = None,
    callback_shards: Iterable[StateShard] = (),
) -> ShardedState:
    """Return this rank's part of the training state: weights, buffers, moments, recent losses, state of callbacks.

    The state refers to the live tensors; it holds no copies. Call once per generation, when the model is parallelized.
    """
    slices = [ParameterSlice(model, name) for name in model.parameters]
    shards = [*build_weights(model)]
    for kind, moments in optimizer.moments.items():
        trained_slices = [weight for weight in slices if weight.name in moments]
        shards += [
            shard
            for weight in trained_slices
            for shard in weight.make_shards(f"optimizer.{kind}", moments[weight.name])
        ]
    for kind, tensors in optimizer.other_state.items():
        shards += [
            shard
            for weight in slices
            if weight.name in tensors
            for shard in weight.make_other_shards(f"optimizer.{kind}", tensors[weight.name])
        ]
    if "exp_avg" in optimizer.moments and not optimizer.other_state:  # other optimizers count none, or for themselves
        shards.append(StateShard.from_tensor(NUM_UPDATES, optimizer.num_updates))
    if recent_losses is not None:
        shards.append(StateShard.from_tensor(RECENT_LOSSES, recent_losses))
    return ShardedState([*shards, *callback_shards])


def build_weights(model: ParallelModel) -> ShardedState:
    """Return this rank's part of the weights and persistent buffers, as part of the state."""
    slices = [ParameterSlice(model, name) for name in model.parameters]
    shards = [shard for weight in slices for shard in weight.make_shards("model", weight.tensor)]
    buffers = list_persistent_buffers(model)
    return ShardedState([*shards, *(StateShard.from_tensor(f"model.{name}", buffer) for name, buffer in buffers)])


class ParameterSlice:
    """The slice of one parameter that this rank stores, and the regions of the global tensor it consists of."""

    def __init__(self, model: ParallelModel, name: str):
        """Find the local slice of parameter `name`, as this rank names it; `shard_spec` has its canonical name."""
        _, box, self.tensor = get_local_slice(model.parameters[name])
        self.name, self.shard_spec = name, model.get_shard_spec(name)
        self.mappings = self.shard_spec.restrict_mappings(box)

    def make_shards(self, kind: str, tensor: torch.Tensor) -> list[StateShard]:
        """Return `tensor` as shards of the state, one per region, named "KIND.CANONICAL_NAME".

        `tensor` is laid out like the slice: the parameter itself or one of its moments.
        """
        local_box = Box.from_shape(tensor.shape)
        return [
            StateShard(
                f"{kind}.{self.shard_spec.name}",
                self.shard_spec.shape,
                get_dtype_name(tensor.dtype),
                mapping.global_box,
                tensor[mapping.local_box.to_slices(local_box)],
            )
            for mapping in self.mappings
        ]

    def make_other_shards(self, kind: str, tensor: torch.Tensor) -> list[StateShard]:
        """Return a tensor that belongs to the parameter as shards: laid out like the slice, or else whole."""
        if tensor.shape == self.tensor.shape:
            return self.make_shards(kind, tensor)
        return [StateShard.from_tensor(f"{kind}.{self.shard_spec.name}", tensor)]


def list_persistent_buffers(model: ParallelModel) -> list[tuple[str, torch.Tensor]]:
    """Return names and tensors of persistent buffers, which are part of the state."""
    buffers = []
    for module in model.modules.values():
        named = dict(module.named_buffers())
        buffers += [(name, named[name]) for name in module.state_dict() if name in named]
    return buffers


def measure_state_memory(model: ParallelModel, optimizer: Optimizer) -> dict[str, float]:
    """Return GiB of weights and moments that this rank holds between two steps, by metric key."""
    sizes = {
        "weights": sum(get_local_slice(parameter)[2].nbytes for parameter in model.parameters.values()),
        "moments": sum(moment.nbytes for moments in optimizer.moments.values() for moment in moments.values()),
    }
    return {f"memory/{kind}_gib": size / 2**30 for kind, size in sizes.items()}


def build_gradient_norm(
    model: ParallelModel, indexes: list[StateIndex], context: ParallelContext, *, exact: bool
) -> GradientNorm:
    """Return the gradient norm in which every element of the global model counts once.

    `indexes`: the state index of every rank. An element that several ranks of one replica hold is counted by the lowest
    of them. `exact`: give the same bits for every layout (train.deterministic=elastic).
    """
    norm_class = ExactGradientNorm if exact else GradientNorm
    regions = find_norm_regions(model, model.parameters, indexes, context.get_state_ranks(), context.rank)
    return norm_class(regions, context.state_group, context.device)


def find_norm_regions(
    model: ParallelModel, parameters: Iterable[str], indexes: list[StateIndex], ranks: list[int], rank: int
) -> dict[str, list[Region]]:
    """Return the regions of the gradients of some parameters that one of `ranks`, which hold a whole state, counts.

    `rank`: this one, or one with the same slices of these parameters.
    """
    slices = [ParameterSlice(model, name) for name in parameters]
    names = {f"model.{weight.shard_spec.name}" for weight in slices}
    owned_regions = find_owned_regions([indexes[rank] for rank in ranks], ranks.index(rank), names)
    regions: dict[str, list[Region]] = {}
    next_shard: Counter[str] = Counter()  # shards of a tensor are numbered in the order in which slices make them
    for weight in slices:
        name = f"model.{weight.shard_spec.name}"
        for mapping in weight.mappings:
            for box in (box for shard, box in owned_regions[name] if shard == next_shard[name]):
                offsets = zip(mapping.local_box.offsets, box.offsets, mapping.global_box.offsets, strict=True)
                region = Box(tuple(local + start - base for local, start, base in offsets), box.sizes)
                is_whole = box.numel == weight.tensor.numel()
                slices_in_tensor = region.to_slices(Box.from_shape(weight.tensor.shape))
                regions.setdefault(weight.name, []).append(None if is_whole else slices_in_tensor)
            next_shard[name] += 1
    return regions
