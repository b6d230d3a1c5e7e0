"""Loader of a script's batches: each rank loads its rows of the batches of a torch DataLoader, in the same order."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from raytrain_hpc.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

    from raytrain_hpc.runtime.script_context import ScriptRank


class ScriptLoader:
    """Endless iterator over the batches of a DataLoader, epoch after epoch. A resumed run continues where it stopped.

    The DataLoader's sampler decides which samples a batch has, on all ranks alike: the order of an epoch is drawn when
    it begins. A rank reads only its rows; random augmentation draws from a stream of its own for each sample.

    A script can draw one batch before its loop, and each next one a step ahead. In a resumed run, a batch that is drawn
    before the loop is then the one that was drawn last, again.
    """

    def __init__(self, loader: Any, rank: ScriptRank | None):
        """Check the loader. Raises ModelError if it has no list of indexes for each batch."""
        if getattr(loader, "batch_sampler", None) is None or not hasattr(loader.dataset, "__len__"):
            raise ModelError("run.loader: needs a torch DataLoader of a map-style dataset with a batch_size")
        self._loader, self._rank = loader, rank
        self._epoch_states: list[str] = []  # of the generators, when the epoch began
        self._num_batches = 0  # of the epoch, used so far
        self._epoch: Iterator[list[int]] | None = None
        self._last_draw: tuple[int, int] | None = None  # of the last batch: what its samples were seeded by,
        self._last_state = ""  # and the generators before it, if a single rank drew from them
        self._num_early = 0  # batches drawn before the loop
        self._is_resumed = False

    def __iter__(self) -> Iterator[Any]:
        """Return the iterator, which is this object."""
        return self

    def __next__(self) -> Any:
        """Return this rank's rows of the next batch, on its device.

        Raises ModelError for an empty epoch, and for a second batch before the loop.
        """
        is_replayed = self._rank is not None and not self._rank.has_started and self._begin_early_batch()
        if self._epoch is None:
            self._epoch = self._resume_epoch() if self._epoch_states else self._begin_epoch()
        indexes = next(self._epoch, None)
        if indexes is None:
            self._num_batches, self._epoch = 0, self._begin_epoch()
            indexes = next(self._epoch, None)
        if indexes is None:
            raise ModelError("run.loader: the DataLoader has no batch")
        self._num_batches += 1
        return self._read(indexes) if self._rank is None else self._read_rows(indexes, self._rank, is_replayed)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {
            "epoch_states": self._epoch_states,
            "num_batches": self._num_batches,
            "last_draw": self._last_draw,
            "last_state": self._last_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position. Call before the first batch."""
        self._epoch_states, self._num_batches = list(state["epoch_states"]), state["num_batches"]
        self._is_resumed = self._num_batches > 0
        if last_draw := state.get("last_draw"):  # checkpoints of earlier versions have none
            self._last_draw, self._last_state = (last_draw[0], last_draw[1]), state["last_state"]

    def _begin_early_batch(self) -> bool:
        """Begin a batch before the loop; return whether it is the last one again. Raises ModelError for a second."""
        self._num_early += 1
        if self._num_early > 1:
            raise ModelError(
                "run.loader: draw at most one batch before the loop over run.steps(): a resumed run draws the last one "
                "again; iterate over the DataLoader itself for others"
            )
        if self._is_resumed:
            self._num_batches -= 1
        return self._is_resumed

    def _list_generators(self) -> list[Any]:
        """Return the generators that the DataLoader and its sampler have of their own."""
        sampler = getattr(self._loader.batch_sampler, "sampler", None)
        candidates = (self._loader.generator, getattr(sampler, "generator", None))
        return [generator for generator in candidates if generator is not None]

    def _begin_epoch(self) -> Iterator[list[int]]:
        if self._rank is not None:
            from raytrain_hpc.training.script_random import pack_generators

            own = [generator.get_state() for generator in self._list_generators()]
            self._epoch_states = [_encode(state) for state in (pack_generators(), *own)]
        return self._draw_epoch()

    def _resume_epoch(self) -> Iterator[list[int]]:
        """Draw the order of the epoch again, and skip the batches that were used."""
        from raytrain_hpc.training.script_random import pack_generators, unpack_generators

        current = pack_generators()
        shared, *own = map(_decode, self._epoch_states)
        unpack_generators(shared)
        for generator, state in zip(self._list_generators(), own, strict=True):
            generator.set_state(state)
        epoch = self._draw_epoch()
        unpack_generators(current)
        return islice(epoch, self._num_batches, None)

    def _draw_epoch(self) -> Iterator[list[int]]:
        import torch

        # A DataLoader draws a seed for its workers before its sampler draws the order.
        torch.empty((), dtype=torch.int64).random_(generator=self._loader.generator)
        return iter([list(indexes) for indexes in self._loader.batch_sampler])

    def _read(self, indexes: list[int]) -> Any:
        return self._loader.collate_fn([self._loader.dataset[index] for index in indexes])

    def _read_rows(self, indexes: list[int], rank: ScriptRank, is_replayed: bool) -> Any:
        """Read this rank's rows of a batch. `is_replayed`: with the same random numbers as the last time."""
        from raytrain_hpc.training.script_random import pack_generators, unpack_generators

        if len(indexes) < rank.world_size:
            raise ModelError(
                f"run.loader: a batch of {len(indexes)} samples for {rank.world_size} ranks; every rank needs "
                "one: use DataLoader(..., drop_last=True) or larger batches"
            )
        rows, current = rank.get_local_rows(len(indexes)), pack_generators()
        if not is_replayed or self._last_draw is None:
            self._last_draw = rank.begin_draw()
            self._last_state = _encode(current) if rank.world_size == 1 else ""
        elif self._last_state:
            unpack_generators(_decode(self._last_state))
        with rank.seed_rows(self._last_draw) as seed_row:
            samples = []
            for row in rows:
                seed_row(row)
                samples.append(self._loader.dataset[indexes[row]])
            batch = rank.move_to_device(self._loader.collate_fn(samples))
        if is_replayed:
            unpack_generators(current)
        return batch


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
