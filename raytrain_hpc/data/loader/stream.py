"""Steps to microbatches: which samples a logical microbatch owns, and what they hold.

Step k owns samples [kB, (k+1)B); logical microbatch v of it owns [kB + v*b, kB + (v+1)*b). Who computes a microbatch is
not known here, so no layout can change what it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_hpc.config.schema import DataConfig
from raytrain_hpc.data.dataset.sources import Dataset, open_dataset
from raytrain_hpc.data.dataset.token_shards import Ints
from raytrain_hpc.data.loader.packing import IGNORE_INDEX, Packing, SampleRows, build_packing, check_source, merge_rows
from raytrain_hpc.data.loader.sampler import MIXTURE_BLOCK_SAMPLES, Mixture, Sampler
from raytrain_hpc.errors import DataError

MAX_LOCATED_SAMPLES = (
    4096  # samples whose places are computed at once: the arithmetic of a permutation costs calls, not numbers
)
MAX_READ_TOKENS = 1 << 20  # at most about so many are read at once


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
    """b sequences of T tokens, as compact as they were read: each property is made anew when it is asked for.

    `samples` int64[b]: the global sample numbers (numbers in the split in an evaluation, -1 for a padded row).
    """

    samples: Ints
    rows: SampleRows

    @property
    def inputs(self) -> Ints:
        """int64[b, T]."""
        return self.rows.to_inputs()

    @property
    def targets(self) -> Ints:
        """int64[b, T], each the token after its input, or -100 where there is none."""
        return self.rows.to_targets()

    @property
    def document_ids(self) -> Ints | None:
        """int64[b, T], numbered from 0 in each row, or None where attention need not keep any apart."""
        return None if self.rows.document_ids is None else self.rows.document_ids[:, :-1].astype(np.int64)

    @property
    def valid_tokens(self) -> int:
        """Targets that count."""
        return int((self.targets != IGNORE_INDEX).sum())

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return self.samples.nbytes + self.rows.nbytes


@dataclass(frozen=True, eq=False)
class Block:
    """Several microbatches one after the other: their samples int64[n], and what these hold."""

    samples: Ints
    rows: SampleRows

    def split_microbatches(self, size: int) -> Iterator[Microbatch]:
        """Cut into microbatches of `size` samples."""
        for part in self.split(size):
            yield Microbatch(part.samples, part.rows)

    def split(self, size: int) -> Iterator[Block]:
        """Cut into blocks of at most `size` samples, without a copy."""
        for first in range(0, len(self.samples), size):
            cut = slice(first, first + size)
            yield Block(self.samples[cut], self.rows.select(cut))

    @property
    def nbytes(self) -> int:
        """What it holds."""
        return self.samples.nbytes + self.rows.nbytes


class Stream(ABC):
    """Where a rank's microbatches come from."""

    micro_batch: int

    @abstractmethod
    def iter_blocks(self, steps: range, microbatches: range, max_microbatches: int) -> Generator[Block, None, None]:
        """Logical microbatches `share` of each of the steps, in order, at most `most` of them in a block.

        DataError where there are no such ones.
        """

    def iter_microbatches(self, steps: range, microbatches: range) -> Generator[Microbatch, None, None]:
        """The same, one by one."""
        for block in self.iter_blocks(steps, microbatches, MAX_LOCATED_SAMPLES):
            yield from block.split_microbatches(self.micro_batch)


class LocalStream(Stream):
    """Reads microbatches straight from the token arrays. Stateless: any step at the cost of the first."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        mixtures: Sequence[Mixture],
        packing: Packing,
        *,
        global_batch: int,
        micro_batch: int,
    ):
        """`global_batch`, `micro_batch`: sequences. DataError where one does not divide the other."""
        if micro_batch < 1 or global_batch < 1 or global_batch % micro_batch:
            raise DataError(f"train.micro_batch={micro_batch}: must divide train.global_batch={global_batch}")
        self._dataset, self._sampler, self._mixtures, self._packing = dataset, sampler, tuple(mixtures), packing
        self.global_batch, self.micro_batch = global_batch, micro_batch

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """Samples that each source has to give in an epoch; places to begin at, with order=random."""
        return self._sampler.sizes

    @property
    def num_microbatches(self) -> int:
        """Logical microbatches a step, V."""
        return self.global_batch // self.micro_batch

    def get_samples(self, step: int, microbatch: int) -> Ints:
        """The samples of logical microbatch v in [0, V) of a step >= 0, int64[b]. DataError outside these."""
        samples: Ints = self._list_samples([(step, microbatch)])[0]
        return samples

    def get_samples_of_steps(self, steps: range, microbatches: range) -> Ints:
        """The samples of microbatches `share` of each of the steps, int64[n]."""
        return self._list_samples([(step, v) for step in steps for v in microbatches]).reshape(-1)

    def read_microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Logical microbatch v in [0, V) of a step >= 0. DataError outside these."""
        samples, source, places = self._locate([(step, microbatch)])
        return Microbatch(samples, self._read(source, places))

    def get_positions(self, step: int, microbatch: int) -> Ints:
        """Where these samples begin in their sources, int64[b]."""
        return self._locate([(step, microbatch)])[2]

    def read_block(self, steps: range, microbatches: range) -> Block:
        """Microbatches `share` of each of the steps, read at once."""
        samples, source, places = self._locate([(step, v) for step in steps for v in microbatches])
        return Block(samples, self._read(source, places))

    def iter_blocks(self, steps: range, microbatches: range, max_microbatches: int) -> Generator[Block, None, None]:
        """As `Stream.blocks`: many are located at once, and some of these read at once."""
        at_once = max(1, MAX_READ_TOKENS // (self._packing.seq_len * self.micro_batch))
        together = 1  # the first one is waited for: from it on, twice as many each time
        wanted = ((step, v) for step in steps for v in microbatches)
        while some := list(islice(wanted, max(1, MAX_LOCATED_SAMPLES // self.micro_batch))):
            samples, source, places = self._locate(some)
            first = 0
            while first < len(samples):
                part = slice(first, first + together * self.micro_batch)
                block = Block(samples[part], self._read(source[part], places[part]))
                yield from block.split(max_microbatches * self.micro_batch)
                first, together = part.stop, min(2 * together, at_once)

    def _list_samples(self, microbatches: Sequence[tuple[int, int]]) -> Ints:
        """The samples of some microbatches (step, v), int64[n, b]."""
        count = self.num_microbatches
        for step, v in microbatches:
            if step < 0 or not 0 <= v < count:
                raise DataError(f"microbatch {v} of step {step}: a step has microbatches 0..{count - 1}")
        firsts = [step * self.global_batch + v * self.micro_batch for step, v in microbatches]
        return np.array(firsts, dtype=np.int64)[:, None] + np.arange(self.micro_batch)

    def _locate(self, microbatches: Sequence[tuple[int, int]]) -> tuple[Ints, Ints, Ints]:
        """Every sample of some microbatches (step, v), its source and its place in that, int64[n] each."""
        samples = self._list_samples(microbatches)
        numbers = samples.reshape(-1)
        if self._sampler.kind == "random":
            drawn = [
                self._sampler.locate_random(step, v, of) for (step, v), of in zip(microbatches, samples, strict=True)
            ]
            return numbers, np.concatenate([of for of, _ in drawn]), np.concatenate([places for _, places in drawn])
        source, within = self._sampler.locate(numbers)
        return numbers, source, self._packing.locate(within)

    def _read(self, source: Ints, positions: Ints) -> SampleRows:
        tokens = self._dataset.train
        present = np.unique(source).tolist() if len(tokens) > 1 else [0]
        if len(present) == 1:
            return self._packing.read(tokens[present[0]], positions)
        mine = [np.flatnonzero(source == s) for s in present]
        parts = [self._packing.read(tokens[s], positions[rows]) for s, rows in zip(present, mine, strict=True)]
        return merge_rows(mine, parts)

    def get_state(self, step: int) -> DataState:
        """The data state once `step` steps are committed. Of a mixture it says what has been dealt so far."""
        d, sample = self._dataset, step * self.global_batch
        mixture = tuple(dict(part) for part in d.mixture)
        for index, part in enumerate(mixture):
            changes = [[m.first_sample, m.weights[index]] for m in self._mixtures[1:] if m.first_sample < sample]
            if changes:
                part["changes"] = changes
        return DataState(self._sampler.seed, sample, d.dataset_hash, mixture)

    def get_resume_step(self, state: DataState) -> int:
        """The step to go on with from a saved state. DataError where the state belongs to other data or batches."""
        step, rest = divmod(state.next_sample, self.global_batch)
        here = self.get_state(step)
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
    dataset: Dataset, data: DataConfig, *, seed: int, seq_len: int, global_batch: int, micro_batch: int
) -> LocalStream:
    """The training stream of a dataset. DataError where a source has no sample, or the batches misfit."""
    packing = build_packing(data.packing, seq_len)
    for index, source in enumerate(dataset.train):
        check_source(packing, source, index)
    count = packing.count_start_positions if data.order == "random" else packing.count_samples
    mixtures = build_mixtures(dataset, data, seq_len)
    order = Sampler([count(source) for source in dataset.train], mixtures, kind=data.order, seed=seed)
    return LocalStream(dataset, order, mixtures, packing, global_batch=global_batch, micro_batch=micro_batch)


def build_mixtures(dataset: Dataset, data: DataConfig, seq_len: int) -> list[Mixture]:
    """The weights of the sources, then those of `data.stages`, from the first whole block behind their tokens on."""
    stages = [
        Mixture(
            -(-stage.from_tokens // (seq_len * MIXTURE_BLOCK_SAMPLES)) * MIXTURE_BLOCK_SAMPLES, tuple(stage.weights)
        )
        for stage in data.stages
    ]
    return [Mixture(0, dataset.weights), *stages]


@dataclass(frozen=True)
class StreamSpec:
    """What any process needs to open the same training stream. Small, and picklable."""

    data: DataConfig
    vocab_size: int
    seed: int
    seq_len: int
    global_batch: int
    micro_batch: int

    def open_dataset(self) -> Dataset:
        """The dataset, preloaded where data.preload says so; its checksums were the driver's affair."""
        preloaded = Path(self.data.preload) if self.data.preload else None
        return open_dataset(
            self.data, vocab_size=self.vocab_size, seed=self.seed, verify_limit_bytes=0, cache_dir=preloaded
        )

    def open_stream(self, dataset: Dataset) -> LocalStream:
        """The training stream of the dataset."""
        return open_stream(
            dataset,
            self.data,
            seed=self.seed,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            micro_batch=self.micro_batch,
        )
