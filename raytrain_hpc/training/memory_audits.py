"""Audits of memory: bits of the state that change between two steps, and of gradients between reduction and update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.distributed.replica_check import CorruptionError
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.state.tensor_hash import compute_hash

_AUDITED_STATE = ("model.", "optimizer.")  # not the state of callbacks, which they may change between two steps

Named = Iterable[tuple[str, Tensor]]


class StateChangedError(CorruptionError):
    """The state of some ranks has changed. `changed`: by rank, the name of the first tensor; `event`: since when."""

    def __init__(self, step: int, changed: Mapping[int, str], event: str):
        details = ", ".join(f"of rank {rank} ({name} first)" for rank, name in changed.items())
        super().__init__(tuple(changed), f"audit of step {step + 1}: the state {details} has changed since {event}")


class TensorHashes:
    """Hashes of tensors, to find out whether their bits have changed."""

    def __init__(self, device: torch.device):
        self._device = device
        self._recorded: Tensor | None = None
        self._names: list[str] = []

    def record(self, tensors: Named) -> None:
        """Compute and keep the hashes of tensors."""
        self._recorded, self._names = self._compute(tensors)

    def find_changed(self, tensors: Named) -> str | None:
        """Return the name of the first tensor whose bits have changed since `record`, which got the same ones."""
        if self._recorded is None:
            raise RuntimeError("no hashes have been recorded")
        hashes, names = self._compute(tensors)
        if len(hashes) != len(self._recorded):  # a callback has added or removed some
            return names[-1]
        changed: list[int] = (hashes != self._recorded).nonzero().flatten().tolist()
        return names[changed[0]] if changed else None

    @property
    def is_recorded(self) -> bool:
        """Whether there are hashes to compare with."""
        return self._recorded is not None

    def get_hashes(self) -> dict[str, Tensor]:
        """Return the hashes by name."""
        return {} if self._recorded is None else dict(zip(self._names[1:], self._recorded[1:], strict=True))

    def _compute(self, tensors: Named) -> tuple[Tensor, list[str]]:
        hashes, names = [torch.zeros((), dtype=torch.int64, device=self._device)], [""]
        for name, tensor in tensors:
            hashes.append(compute_hash(tensor).to(self._device))
            names.append(name)
        return torch.stack(hashes), names


class MemoryAudits:
    """Hashes of this rank's state and gradients while nothing may change them, compared before they are used.

    `buffers`: names of state that passes change. `release_memory`: called after moments were read.
    """

    def __init__(
        self,
        state: ShardedState,
        buffers: Collection[str],
        get_gradients: Callable[[], Mapping[str, Tensor]],
        release_memory: Callable[[], None],
        device: torch.device,
    ):
        self._get_gradients, self._release_memory = get_gradients, release_memory
        shards = [(shard.name, shard.tensor) for shard in state if shard.name.startswith(_AUDITED_STATE)]
        self._buffers = [(name, tensor) for name, tensor in shards if name in buffers]
        self._shards = [(name, tensor) for name, tensor in shards if name not in buffers]
        self._state, self._buffer_state = TensorHashes(device), TensorHashes(device)
        self._gradients = TensorHashes(device)

    def record_state(self) -> None:
        """Hash the state after a step. Call on all ranks, before a step that is audited."""
        self._state.record(self._shards)
        self._buffer_state.record(self._buffers)
        self._release_memory()

    def find_changed_state(self, *, after_passes: bool = False) -> str | None:
        """Return the name of the first tensor that has changed since `record_state`; None if none has.

        Call before the passes of a step, and again after them. None if nothing was recorded: a step that is run by
        itself, without a training loop.
        """
        if not self._state.is_recorded:
            return None
        changed = self._state.find_changed(self._shards)
        if not after_passes:
            changed = changed or self._buffer_state.find_changed(self._buffers)
        self._release_memory()
        return changed

    @property
    def recorded_gradients(self) -> Mapping[str, Tensor]:
        """The hashes of the gradients, by name."""
        return self._gradients.get_hashes()

    def record_gradients(self) -> None:
        """Hash the gradients of a step, which have just been reduced."""
        self._gradients.record(self._get_gradients().items())

    def find_changed_gradient(self) -> str | None:
        """Return the name of the first gradient of this rank that has changed since; None if none has."""
        return self._gradients.find_changed(self._get_gradients().items())


def gather_texts(text: str | None, context: ParallelContext) -> dict[int, str]:
    """Return the texts of all ranks that have one, by rank. Collective over all ranks."""
    texts: list[str | None] = [text] * context.layout.world_size
    if context.world_group is not None:
        dist.all_gather_object(texts, text, group=context.world_group)
    return {rank: of_rank for rank, of_rank in enumerate(texts) if of_rank is not None}
