"""Steps to microbatches: which samples a logical microbatch owns, and their tokens.

Step k owns samples [kB, (k+1)B); logical microbatch v of it owns [kB + v*b, kB + (v+1)*b). Who computes a microbatch is
not known here, so no layout can change what it holds. Windows run over the flat token stream of a source: a window may
span two documents, which attention does not tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytrain_hpc.data.order import Kind, Order
from raytrain_hpc.data.sources import Dataset
from raytrain_hpc.errors import DataError

IGNORED = -100  # target of a position that counts for no loss


@dataclass(frozen=True)
class DataState:
    """Where a run stands in its data. Holds no rank and no world size, so any layout can go on from it."""

    seed: int
    next_sample: int
    dataset_hash: str
    mixture: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {**asdict(self), "mixture": list(self.mixture)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataState:
        """Read what `to_json` wrote. DataError where something is missing or of the wrong type."""
        try:
            mixture = tuple(dict(part) for part in data["mixture"])
            return cls(int(data["seed"]), int(data["next_sample"]), str(data["dataset_hash"]), mixture)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"data state: not readable ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, eq=False)
class Microbatch:
    """b sequences of T tokens.

    `inputs` int64[b, T]; `targets` int64[b, T], each the token after its input, or -100 where there is none; `samples`
    int64[b], the global sample numbers (window numbers in an evaluation, -1 for a padded row); `valid_tokens`, the
    number of targets that are not -100.
    """

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]
    valid_tokens: int


class LocalStream:
    """Reads microbatches straight from the token arrays. Stateless: any step at the cost of the first."""

    def __init__(self, dataset: Dataset, order: Order, *, global_batch: int, micro_batch: int):
        """`global_batch`, `micro_batch`: sequences. DataError where one does not divide the other."""
        if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
            raise DataError(f"train.micro_batch={micro_batch}: must divide train.global_batch={global_batch}")
        self._dataset, self._order = dataset, order
        self.global_batch, self.micro_batch = global_batch, micro_batch

    @property
    def num_microbatches(self) -> int:
        """Logical microbatches a step, V."""
        return self.global_batch // self.micro_batch

    def microbatch(self, step: int, v: int) -> Microbatch:
        """Logical microbatch v in [0, V) of a step >= 0. DataError outside these."""
        if step < 0 or not 0 <= v < self.num_microbatches:
            raise DataError(f"microbatch {v} of step {step}: a step has microbatches 0..{self.num_microbatches - 1}")
        first = step * self.global_batch + v * self.micro_batch
        samples = first + np.arange(self.micro_batch, dtype=np.int64)
        if self._order.kind == "random":
            source, start = self._order.locate_random(step, v, self.micro_batch)
        else:
            source, start = self._order.locate(samples)
        length = self._order.seq_len + 1
        windows = np.empty((samples.size, length), dtype=np.int64)
        for s in np.unique(source):
            mine = source == s
            windows[mine] = self._dataset.train[s].read(start[mine], length)
        return Microbatch(windows[:, :-1].copy(), windows[:, 1:].copy(), samples, samples.size * self._order.seq_len)

    def state(self, step: int) -> DataState:
        """The data state once `step` steps are committed."""
        d = self._dataset
        return DataState(self._order.seed, step * self.global_batch, d.dataset_hash, d.mixture)

    def step_of(self, state: DataState) -> int:
        """The step to go on with from a saved state. DataError where the state belongs to other data or batches."""
        step, rest = divmod(state.next_sample, self.global_batch)
        here = self.state(step)
        for name in ("dataset_hash", "mixture", "seed"):
            saved, current = getattr(state, name), getattr(here, name)
            if saved != current:
                raise DataError(
                    f"data state: {name}={saved!r} was saved and this run has {current!r}; use the same data"
                )
        if rest:
            raise DataError(
                f"data state: next_sample={state.next_sample} is no multiple of train.global_batch="
                f"{self.global_batch}; use the global batch of the run that saved it"
            )
        return step


def open_stream(
    dataset: Dataset, *, order: Kind, seed: int, seq_len: int, global_batch: int, micro_batch: int
) -> LocalStream:
    """The training stream of a dataset. DataError where a source is shorter than a window, or the batches misfit."""
    lengths = [source.num_tokens for source in dataset.train]
    windows = Order(lengths, dataset.weights, kind=order, seed=seed, seq_len=seq_len)
    return LocalStream(dataset, windows, global_batch=global_batch, micro_batch=micro_batch)
