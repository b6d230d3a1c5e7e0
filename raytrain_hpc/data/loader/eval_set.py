"""Evaluation set: batches over a whole validation split, with every target exactly once."""

from __future__ import annotations

import numpy as np

from raytrain_hpc.data.dataset.token_shards import TokenSource
from raytrain_hpc.data.loader.packing import Packing
from raytrain_hpc.data.loader.stream import Microbatch
from raytrain_hpc.errors import DataError

_CHECKED_BATCH_SIZE = 16


def make_no_target_error(name: str) -> DataError:
    """Return the error for a validation set in which nothing counts in the loss. `name`: of the set."""
    return DataError(
        f"no token of {name} counts in the loss, as if all prompts are longer than train.seq_len, or a loss of your "
        "own counts nothing; make eval.samples larger (0: all), or start a run in another run.dir with a larger "
        "train.seq_len or other data"
    )


def check_targets(tokens: TokenSource, packing: Packing, max_samples: int) -> None:
    """Raise DataError if no target of the samples of an evaluation counts. Reads up to the first one that does.

    Call before training: the only evaluation may be at its end.
    """
    evaluation = EvaluationSet(tokens, packing, _CHECKED_BATCH_SIZE, max_samples)
    if not any(evaluation.get_batch(index).valid_tokens for index in range(evaluation.num_batches)):
        raise make_no_target_error("the validation set")


class EvaluationSet:
    """Samples of a split in order, in batches of equal shape.

    A short last window and an incomplete last batch are padded with input 0 and target -100, so that every target of
    the split counts exactly once. `max_samples` > 0 selects at most that many samples, spread evenly.
    """

    def __init__(self, tokens: TokenSource, packing: Packing, batch_size: int, max_samples: int = 0):
        """Validate the sizes; `batch_size` is in samples. Raises DataError if the split has no target."""
        if tokens.num_tokens < 2:
            raise DataError(f"validation split of {tokens.num_tokens} tokens: needs at least 2")
        if packing.seq_len < 1 or batch_size < 1 or max_samples < 0:
            raise DataError(
                f"evaluation of seq_len={packing.seq_len}, batch={batch_size}, limit={max_samples}: too small"
            )
        self._tokens, self._packing, self._batch_size = tokens, packing, batch_size
        self._num_available = packing.count_eval_samples(tokens)
        self.num_samples = min(max_samples, self._num_available) if max_samples else self._num_available

    @property
    def num_batches(self) -> int:
        """Number of batches per evaluation."""
        return -(-self.num_samples // self._batch_size)

    def get_batch(self, index: int) -> Microbatch:
        """Return batch `index` in [0, num_batches). Raises DataError if out of range."""
        if not 0 <= index < self.num_batches:
            raise DataError(f"evaluation batch {index}: out of range; there are {self.num_batches}")
        indexes = np.arange(index * self._batch_size, min((index + 1) * self._batch_size, self.num_samples))
        numbers = indexes * self._num_available // self.num_samples
        rows = self._packing.read(self._tokens, self._packing.locate(numbers)).pad_to(self._batch_size)
        return Microbatch(np.pad(numbers, (0, self._batch_size - numbers.size), constant_values=-1), rows)
