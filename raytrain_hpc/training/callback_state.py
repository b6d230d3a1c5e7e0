"""State of a user's callbacks as part of the training state: tensors, and all other values as JSON in a byte tensor."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.callbacks.callback import Callback, ParameterState
from raytrain_hpc.distributed.handshake import PeerInfo
from raytrain_hpc.errors import CallbackError
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState, StateShard
from raytrain_hpc.training.callback_list import CallbackRequests, get_callback_name
from raytrain_hpc.training.state_builder import ParameterSlice
from raytrain_hpc.training.state_loader import CALLBACK_PREFIX

VALUES = f"{CALLBACK_PREFIX}values"
_MAX_VALUES_BYTES = 1 << 16
_PLAIN_TYPES = (int, float, str, bool, type(None))


@dataclass
class PendingRequests:
    """Requests of callbacks after `step`, part of the state: a recovery to this step carries them out again.

    `is_agreed`: they are those of all ranks; otherwise those of this rank. `num_evaluations`: evaluations of this step
    whose effects on callbacks are part of the state. `eval_metrics`: what the last one has added to the metrics.
    """

    step: int = -1
    requests: CallbackRequests = field(default_factory=CallbackRequests)
    is_agreed: bool = True
    num_evaluations: int = 0
    eval_metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def progress(self) -> tuple[int, int]:
        """What orders the states of ranks that a fault has found at different points of the same step."""
        return self.step, self.num_evaluations

    def count_evaluations(self, step: int) -> int:
        """Return `num_evaluations` if these are the requests after `step`, otherwise 0."""
        return self.num_evaluations if self.step == step else 0


class CallbackState:
    """State of the callbacks of a rank. Without callbacks it is empty and costs nothing."""

    def __init__(self, callbacks: Sequence[Callback], dropped: Collection[Callback], model: ParallelModel):
        """Allocate the state. Call when `on_generation_start` was called. Raises CallbackError for unusable state.

        `dropped`: the optional callbacks that have failed on any rank, as the list of callbacks keeps them.
        """
        self.pending, self._dropped = PendingRequests(), dropped
        self._agreed: PendingRequests | None = None  # by `agree_on_sources`, for the next `restore`
        self._plain_values: dict[str, Any] = {}
        self._kept: dict[str, list[Tensor]] = {}  # copies of the tensors of optional callbacks, to put back
        self._callbacks = _name_callbacks(callbacks)
        self._slices = {name: ParameterSlice(model, name) for name in model.trainable_parameters if callbacks}
        self._values = torch.zeros(_MAX_VALUES_BYTES if callbacks else 0, dtype=torch.uint8)
        self._tensors: dict[tuple[str, str], Tensor] = {}
        self._parameter_states: dict[tuple[str, str], ParameterState] = {}
        for name, callback in self._callbacks.items():
            for key, value in _get_state(name, callback).items():
                if isinstance(value, ParameterState):
                    self._parameter_states[name, key] = self._check_parameter_state(name, key, value)
                elif isinstance(value, Tensor):
                    self._tensors[name, key] = value.detach()
        self.capture()
        self._values.zero_()  # so that `restore` finds only what was loaded

    def list_shards(self) -> list[StateShard]:
        """Return this rank's part of the state."""
        if not self._callbacks:
            return []
        shards = [StateShard.from_tensor(VALUES, self._values)]
        shards += [
            StateShard.from_tensor(f"{CALLBACK_PREFIX}{name}.{key}", tensor)
            for (name, key), tensor in self._tensors.items()
        ]
        for (name, key), state in self._parameter_states.items():
            kind = f"{CALLBACK_PREFIX}{name}.{key}"
            shards += [shard for p, tensor in state.items() for shard in self._slices[p].make_shards(kind, tensor)]
        return shards

    def list_replicated(self) -> ShardedState:
        """Return the part that all ranks must hold alike: all but the tensors laid out like parameters."""
        names = {VALUES, *(f"{CALLBACK_PREFIX}{name}.{key}" for name, key in self._tensors)}
        return ShardedState(shard for shard in self.list_shards() if shard.name in names)

    def find_kind(self, state: ParameterState) -> str:
        """Return the kind of the shards of a ParameterState. Raises CallbackError if it is not part of the state."""
        for (name, key), own_state in self._parameter_states.items():
            if own_state is state or all(own_state[p] is state.get(p) for p in own_state):
                return f"{CALLBACK_PREFIX}{name}.{key}"
        raise CallbackError("exchange_weights: pass a ParameterState that state_dict of the callback returns")

    def capture(self, pending: PendingRequests | None = None) -> None:
        """Take over the current values, and requests that are not carried out yet. Call after every step.

        Tensors that a callback has replaced are copied. Raises CallbackError if their shapes have changed.
        """
        self.pending = pending or self.pending
        values = self._plain_values
        for name, callback in self._callbacks.items():
            if callback in self._dropped:  # has the state of the step before, on all ranks
                for tensor, kept in zip(self._list_tensors(name), self._kept[name], strict=True):
                    tensor.copy_(kept)
                continue
            values[name] = {}
            for key, value in _get_state(name, callback).items():
                if isinstance(value, ParameterState):
                    self._copy_parameter_state(name, key, value)
                elif isinstance(value, Tensor):
                    self._copy_tensor(f"{name}.{key}", self._tensors.get((name, key)), value.detach())
                else:
                    values[name][key] = _check_plain(f"{name}.{key}", value)
            if callback.optional:  # one that fails on a rank can have changed its tensors on the others
                self._kept[name] = [tensor.clone() for tensor in self._list_tensors(name)]
        if self._callbacks:
            self._write_values({"callbacks": values, "pending": self._pending_to_json()})

    def agree_on_sources(
        self, source_state: ShardedState, peer_info: PeerInfo, group: dist.ProcessGroup | None
    ) -> PeerInfo:
        """Agree on the version of a step in memory, and on its requests; return `peer_info` without older versions.

        Collective if there are callbacks. Call before the state is restored. `source_state`: this rank's, whose indexes
        `peer_info` has. At a fault, one rank can have seen the end of an evaluation, with what callbacks changed then,
        and another one not. Ranks may not have agreed on their requests either: those of all count, and one that has
        agreed knows also those of ranks that are lost.
        """
        if not self._callbacks or group is None:
            return peer_info
        own = next((_read_pending(shard.tensor) for shard in source_state if shard.name == VALUES), None)
        gathered: list[PendingRequests | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, own, group=group)
        newest = max((pending.progress for pending in gathered if pending is not None), default=None)
        candidates = [pending for pending in gathered if pending is not None and pending.progress == newest]
        agreed = next((pending for pending in candidates if pending.is_agreed), None)
        if agreed is None and candidates:
            requests = CallbackRequests()
            for pending in candidates:
                requests = requests.union(pending.requests)
            agreed = replace(candidates[0], requests=requests, is_agreed=True)
        self._agreed = agreed
        indexes = [
            index if pending is None or pending.progress == newest else StateIndex()
            for index, pending in zip(peer_info.source_indexes, gathered, strict=True)
        ]
        return replace(peer_info, source_indexes=indexes)

    def sync(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Give all ranks the replicated state of rank 0. Collective. Call before `restore`.

        At a fault, one rank can have dropped an optional callback that has failed on it, and another not.
        """
        if self._callbacks and group is not None:
            for tensor in (self._values, *self._tensors.values()):
                received = tensor.to(device)
                dist.broadcast(received, group=group, group_src=0)
                tensor.copy_(received)

    def restore(self) -> None:
        """Load the state into the callbacks. Call after the tensors have been filled.

        A callback that the state does not know keeps its initial state: in a fresh run, and if it was added later.
        """
        saved = _read_values(self._values)
        self.pending = self._agreed or _pending_from_json(saved.get("pending"))
        self._agreed = None
        for name, callback in self._callbacks.items():
            if name in saved.get("callbacks", {}):
                tensors = {key: tensor for (owner, key), tensor in self._tensors.items() if owner == name}
                states = {key: state for (owner, key), state in self._parameter_states.items() if owner == name}
                _load_state(name, callback, {**saved["callbacks"][name], **tensors, **states})
        self.capture()

    def get_outstanding_requests(self, step: int) -> CallbackRequests:
        """Return the requests that were made after `step` and not carried out when the state was captured."""
        return self.pending.requests if self.pending.step == step else CallbackRequests()

    def get_eval_metrics(self, step: int) -> dict[str, Any]:
        """Return the metrics of the evaluation of `step` whose effects on callbacks are part of the state, if any."""
        return self.pending.eval_metrics if self.pending.step == step else {}

    def _list_tensors(self, name: str) -> list[Tensor]:
        """Return the tensors of a callback, replicated and per parameter."""
        states = (state for (owner, _), state in self._parameter_states.items() if owner == name)
        replicated = [tensor for (owner, _), tensor in self._tensors.items() if owner == name]
        return [*replicated, *(tensor for state in states for tensor in state.values())]

    def _check_parameter_state(self, name: str, key: str, state: ParameterState) -> ParameterState:
        for parameter, tensor in state.items():
            expected = self._slices[parameter].tensor if parameter in self._slices else None
            if expected is None or tensor.shape != expected.shape:
                shape = "not a trainable parameter" if expected is None else f"of shape {list(tensor.shape)}"
                raise CallbackError(
                    f"callback {name}: state_dict()[{key!r}]: {parameter} is {shape}; clone context.parameters"
                )
        return state

    def _copy_parameter_state(self, name: str, key: str, state: ParameterState) -> None:
        own_state = self._parameter_states.get((name, key))
        if own_state is None or own_state.keys() != state.keys():
            raise CallbackError(f"callback {name}: state_dict()[{key!r}] has other parameters than at the start")
        for parameter, tensor in state.items():
            self._copy_tensor(f"{name}.{key}.{parameter}", own_state[parameter], tensor)

    def _copy_tensor(self, label: str, own_tensor: Tensor | None, tensor: Tensor) -> None:
        if own_tensor is None or own_tensor.shape != tensor.shape or own_tensor.dtype != tensor.dtype:
            raise CallbackError(
                f"callback state {label}: tensors must exist from on_generation_start on, with the same shape and dtype"
            )
        if own_tensor is not tensor and own_tensor.data_ptr() != tensor.data_ptr():
            own_tensor.copy_(tensor)

    def _write_values(self, values: Mapping[str, Any]) -> None:
        text = json.dumps(values).encode()
        if len(text) > _MAX_VALUES_BYTES:
            sizes = {name: len(json.dumps(state)) for name, state in values["callbacks"].items()}
            largest = max(sizes, key=lambda name: sizes[name])
            raise CallbackError(
                f"callback {largest}: {sizes[largest]} bytes of values in state_dict; the limit for all callbacks is "
                f"{_MAX_VALUES_BYTES} bytes: return large state as tensors"
            )
        self._values.zero_()
        self._values[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def _pending_to_json(self) -> dict[str, Any]:
        pending, requests = self.pending, self.pending.requests
        flags = {"save": requests.save, "evaluate": requests.evaluate, "stop": requests.stop}
        return {
            "step": pending.step,
            "labels": list(requests.labels),
            **flags,
            "is_agreed": pending.is_agreed,
            "num_evaluations": pending.num_evaluations,
            "eval_metrics": pending.eval_metrics,
        }


def _read_values(values: Tensor) -> dict[str, Any]:
    """Return all values that are no tensors; empty if there are none, as before the first `capture`."""
    text = bytes(values.numpy()).rstrip(b"\0").decode()
    return json.loads(text) if text else {}


def _read_pending(values: Tensor) -> PendingRequests:
    return _pending_from_json(_read_values(values).get("pending"))


def _pending_from_json(values: Mapping[str, Any] | None) -> PendingRequests:
    if not values:
        return PendingRequests()
    requests = CallbackRequests(values["save"], values["evaluate"], values["stop"], tuple(values["labels"]))
    return PendingRequests(  # checkpoints of earlier versions have no other entries
        values["step"],
        requests,
        values.get("is_agreed", True),
        values.get("num_evaluations", 0),
        values.get("eval_metrics", {}),
    )


def _name_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Return the callbacks by the names of their classes, which are numbered if a class occurs again."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        name = get_callback_name(callback)
        count = sum(other.split("#")[0] == name for other in named)
        named[f"{name}#{count + 1}" if count else name] = callback
    return named


def _get_state(name: str, callback: Callback) -> dict[str, Any]:
    try:
        return callback.state_dict()
    except Exception as error:  # of any type: the code is the user's
        raise CallbackError(f"callback {name}: state_dict failed: {type(error).__name__}: {error}") from error


def _load_state(name: str, callback: Callback, state: dict[str, Any]) -> None:
    try:
        callback.load_state_dict(state)
    except Exception as error:  # of any type: the code is the user's
        raise CallbackError(f"callback {name}: load_state_dict failed: {type(error).__name__}: {error}") from error


def _check_plain(label: str, value: Any) -> Any:
    """Return a value that JSON can hold. Raises CallbackError for others."""
    if isinstance(value, list | tuple):
        return [_check_plain(label, item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _check_plain(label, item) for key, item in value.items()}
    if isinstance(value, _PLAIN_TYPES):
        return value
    raise CallbackError(
        f"callback state {label}: {type(value).__name__} is not supported; return numbers, text, lists, dicts with "
        "text keys, or a tensor as an entry of state_dict itself"
    )
