"""Loader of a script's batches: each rank loads its rows of the batches of a torch DataLoader, in the same order."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from raytrain_hpc.runtime.script_context import ScriptRank


class ScriptLoader:
    """Endless iterator over the batches of a DataLoader, epoch after epoch. A resumed run continues where it stopped.

    The DataLoader's sampler decides which samples a batch has, on all ranks alike. A rank reads only its rows.
    """

    def __init__(self, loader: Any, rank: ScriptRank | None):
        self._loader, self._rank = loader, rank
        self._epoch_state, self._num_batches = "", 0  # torch's generator when the epoch began; batches since then
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator, which is this object."""
        return self

    def __next__(self) -> Any:
        """Return this rank's rows of the next batch, on its device."""
        if self._batches is None:
            self._batches = self._resume_epoch() if self._num_batches else self._begin_epoch()
        batch = next(self._batches, None)
        if batch is None:
            self._num_batches = 0
            self._batches = self._begin_epoch()
            batch = next(self._batches)
        self._num_batches += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"epoch_state": self._epoch_state, "num_batches": self._num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position. Call before the first batch."""
        self._epoch_state, self._num_batches = state["epoch_state"], state["num_batches"]

    def _begin_epoch(self) -> Iterator[Any]:
        import torch

        self._epoch_state = _encode(torch.get_rng_state())
        return self._iter_epoch(0)

    def _resume_epoch(self) -> Iterator[Any]:
        """Draw the order of the epoch again, and skip the batches that were used."""
        import torch

        current = torch.get_rng_state()
        torch.set_rng_state(_decode(self._epoch_state))
        batches = self._iter_epoch(self._num_batches)
        first = next(batches, None)  # draws the order
        torch.set_rng_state(current)
        if first is None:
            return iter(())
        return _prepend(first, batches)

    def _iter_epoch(self, num_skipped: int) -> Iterator[Any]:
        import torch

        # A DataLoader draws a seed for its workers before its sampler draws the order.
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        for number, indexes in enumerate(self._loader.batch_sampler):
            if number >= num_skipped:
                yield self._read(list(indexes))

    def _read(self, indexes: list[int]) -> Any:
        rows = range(len(indexes)) if self._rank is None else self._rank.get_local_rows(len(indexes))
        dataset, local = self._loader.dataset, indexes[rows.start : rows.stop]
        read_many = getattr(dataset, "__getitems__", None)
        samples = read_many(local) if read_many else [dataset[index] for index in local]
        batch = self._loader.collate_fn(samples)
        return batch if self._rank is None else self._rank.move_to_device(batch)


def _prepend(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


class FunctionLoader:
    """Endless iterator over the batches that a function draws from random generators.

    A script can draw a batch before its loop and each next one a step ahead. In a recovered run, a batch that is drawn
    before the loop is then the one that was drawn last, again.
    """

    def __init__(self, function: Callable[[], Any], rank: ScriptRank | None):
        self._function, self._rank = function, rank
        self._last_state = self._replayed_state = ""

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator, which is this object."""
        return self

    def __next__(self) -> Any:
        """Return the next batch."""
        if self._rank is None:
            return self._function()
        from raytrain_hpc.training.script_random import pack_generators, unpack_generators

        if not self._replayed_state or self._rank.has_started:
            self._last_state = _encode(pack_generators())
            return self._function()
        current = pack_generators()
        unpack_generators(_decode(self._replayed_state))
        self._last_state, self._replayed_state = self._replayed_state, ""
        batch = self._function()
        unpack_generators(current)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators before the last batch was drawn."""
        return {"last_state": self._last_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw the last batch again if the script asks for one before its loop."""
        self._replayed_state = state["last_state"]


def _encode(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
