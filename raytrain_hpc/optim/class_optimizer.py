"""An optimizer class of torch, of another package or of the user, on the slices that this rank holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import Config
from raytrain_hpc.optim.offload import CHUNK_BYTES, OnDevice, OptimizerChunk, make_moment_storage
from raytrain_hpc.optim.optimizer import Optimizer, get_local_slices, split_into_groups
from raytrain_hpc.optim.optimizer_class import OptimizerClass, State, find_state
from raytrain_hpc.state.shard_spec import ShardSpec

NUM_UPDATES = "num_updates"  # kind of the number of updates of each parameter; 0: the class has not set its state yet


@dataclass(frozen=True)
class _StateKinds:
    """Kinds of state: `moments` are laid out like the slice. `others`: those of each parameter, with an example."""

    moments: tuple[str, ...]
    others: dict[str, State]


class ClassOptimizer(Optimizer):
    """An optimizer class by its path, as `OptimizerClass` runs it.

    State of the shape of the slice is kept like AdamW's moments, in a moment storage. Other state, such as a step
    count, is whole on every rank that holds a part of the parameter: `other_state`. Numbers are stored as scalars.
    """

    is_elementwise = False  # the state of a parameter as a whole is not

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: Config,
        shard_specs: Mapping[str, ShardSpec],
        rank: int,
        moment_kinds: tuple[str, ...] | None = None,
    ):
        """Find the state by a step with zero gradients on copies of the slices. `shard_specs`: by local name.

        `moment_kinds`: the state to keep like moments; None: all that has the shape of its slice in all slices.
        Raises ConfigError for state that is not supported.
        """
        self._class, self._settings, self._shard_specs, self._rank = OptimizerClass(config), config, shard_specs, rank
        slices = get_local_slices(parameters)
        self._kinds = _find_kinds(self._class, slices, moment_kinds)
        if not self._kinds.moments and config.parallel.offload != "none":
            raise self._class.build_error("keeps no state to offload; set parallel.offload=none")
        storage = make_moment_storage(config, rank, slices, self._kinds.moments)
        self._is_split = not isinstance(storage, OnDevice)  # into chunks, which can have parts of one parameter
        elastic = config.train.deterministic == "elastic"
        super().__init__(parameters, config.optimizer, storage, elastic=elastic)
        names = {name: spec.name for name, spec in shard_specs.items()}
        decay = self._class.weight_decay or 0.0
        self._groups = split_into_groups(parameters, names, config.optimizer.groups, decay)
        # Not those of empty slices, which are never updated: their counts would fall behind those of other ranks.
        self.other_state = {NUM_UPDATES: {name: torch.zeros((), dtype=torch.float64) for name in self._kinds.others}}
        for name, state in self._kinds.others.items():
            for kind, value in state.items():
                tensor = _to_tensor(value)
                if tensor.ndim and shard_specs[name].shape not in (slices[name].shape, tensor.shape):
                    raise self._class.build_error(
                        f"keeps {kind} of shape {list(tensor.shape)} for a slice of {shard_specs[name].name}, which "
                        "cannot be resharded; set parallel.zero=0 and parallel.tp=1"
                    )
                self.other_state.setdefault(kind, {})[name] = torch.zeros_like(tensor)

    def make_temporary(self, weights: Mapping[str, Tensor]) -> ClassOptimizer:
        """Implement `Optimizer.make_temporary`."""
        settings = deepcopy(self._settings)
        settings.parallel.offload = "none"
        parameters = {name: nn.Parameter(weight, requires_grad=False) for name, weight in weights.items()}
        other = ClassOptimizer(parameters, settings, self._shard_specs, self._rank, self._kinds.moments)
        other._is_split = self._is_split
        other.update_hooks = self.update_hooks
        return other

    def _apply(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        counts, new_states = self.other_state[NUM_UPDATES], dict[str, State]()
        initialized = {name for name in gradients if int(counts[name])}
        for group in self._groups:
            selected = {name: gradient for name, gradient in gradients.items() if name in group.names}
            weight_decay = None if self._class.weight_decay is None else group.weight_decay
            for part in _split_new(selected, initialized):
                for chunk in self._storage.iter_chunks(part):
                    states = [
                        self._get_state(chunk, position) if name in initialized else {}  # the class then sets it
                        for position, name in enumerate(chunk.names)
                    ]
                    rate = lr * group.lr_factor
                    states = self._class.step(chunk.weights, chunk.gradients, states, rate, weight_decay)
                    for position, (name, state) in enumerate(zip(chunk.names, states, strict=True)):
                        self._store_moments(chunk, position, state)
                        new_states[name] = state
        for name, state in new_states.items():  # when no chunk needs the old state any more
            counts[name] += 1
            for kind in self._kinds.others[name]:
                if state[kind] is not self.other_state[kind][name]:
                    self.other_state[kind][name].copy_(_to_tensor(state[kind]))

    def _get_state(self, chunk: OptimizerChunk, position: int) -> State:
        """Return the state of one part of a parameter, as the class gave it after the last update."""
        name = chunk.names[position]
        state: State = {kind: moments[position] for kind, moments in chunk.moments.items()}
        for kind, example in self._kinds.others[name].items():
            own = self.other_state[kind][name]
            if not isinstance(example, Tensor):
                state[kind] = type(example)(own)
            elif own.ndim or example.shape == own.shape and not self._is_split:
                state[kind] = own
            else:  # a copy, since the class may change it in place: another chunk may have another part
                state[kind] = own.clone().view(example.shape)
        return state

    def _store_moments(self, chunk: OptimizerChunk, position: int, state: State) -> None:
        """Copy the moments that the class has allocated or replaced into the storage."""
        for kind, moments in chunk.moments.items():
            if kind in state and state[kind] is not moments[position]:
                moments[position].copy_(state[kind])


def _split_new(gradients: Mapping[str, Tensor], initialized: Collection[str]) -> Iterator[dict[str, Tensor]]:
    """Split into the weights that have state, and small parts of those that do not.

    The class allocates state in the first update of a weight. It is then copied into the storage, and freed.
    """
    yield {name: gradient for name, gradient in gradients.items() if name in initialized}
    part, size = dict[str, Tensor](), 0
    for name, gradient in gradients.items():
        if name not in initialized:
            if part and size + gradient.nbytes > CHUNK_BYTES:
                yield part
                part, size = {}, 0
            part[name] = gradient
            size += gradient.nbytes
    yield part


def _find_kinds(
    optimizer_class: OptimizerClass, slices: Mapping[str, Tensor], moment_kinds: tuple[str, ...] | None
) -> _StateKinds:
    """Find the state of all slices. Slices of one shape have the same."""
    known: dict[tuple[torch.Size, torch.dtype], State] = {}
    states: dict[str, State] = {}
    for name, weight in slices.items():
        if weight.numel():
            key = weight.shape, weight.dtype
            if key not in known:
                known[key] = find_state(optimizer_class, weight)
            states[name] = known[key]
    kinds = {kind for state in states.values() for kind in state}
    laid_out = [
        kind
        for kind in kinds
        if all(_is_laid_out_like(slices[name], state.get(kind)) for name, state in states.items())
    ]
    moments = set(laid_out if moment_kinds is None else moment_kinds)
    others = {
        name: {kind: value for kind, value in state.items() if kind not in moments} for name, state in states.items()
    }
    return _StateKinds(tuple(sorted(moments)), others)


def _is_laid_out_like(weight: Tensor, value: object) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape and value.dtype == weight.dtype


def _to_tensor(value: Tensor | float) -> Tensor:
    """Return a value of an optimizer's state as a tensor, without dimensions if it is one number."""
    if isinstance(value, Tensor):
        return value.detach().view(()) if value.numel() == 1 else value.detach()
    return torch.tensor(value, dtype=torch.float64)
