"""Training stream: map steps to microbatches, and read the samples of a microbatch.

Step k owns samples [kB, (k+1)B); its logical microbatch v owns [kB + v*b, kB + (v+1)*b). The mapping does not involve
ranks, so the content of a microbatch is independent of the layout.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from raytrain_hpc.config.schema import DataConfig
from raytrain_hpc.data.dataset.sources import Dataset, open_dataset
from raytrain_hpc.data.dataset.storage import parse_location
from raytrain_hpc.data.dataset.token_shards import Ints
from raytrain_hpc.data.loader.packing import IGNORE_INDEX, Packing, SampleRows, build_packing, check_source, merge_rows
from raytrain_hpc.data.loader.sampler import MIXTURE_BLOCK_SAMPLES, Mixture, Sampler
from raytrain_hpc.errors import DataError
from raytrain_hpc.storage.read_retry import NO_RETRY, ReadRetry

MAX_LOCATED_SAMPLES = 4096  # per call: evaluating a permutation costs per call, not per sample
MAX_READ_TOKENS = 1 << 20  # approximate limit per read


@dataclass(frozen=True)
class DataState:
    """Data position of a run. Independent of ranks and world size, so any layout can resume from it."""

    seed: int
    next_sample: int
    dataset_hash: str
    mixture: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return {**asdict(self), "mixture": list(self.mixture)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DataState:
        """Parse the output of `to_json`. Raises DataError if a key is missing or has the wrong type."""
        try:
            mixture = tuple(dict(source) for source in data["mixture"])
            return cls(int(data["seed"]), int(data["next_sample"]), str(data["dataset_hash"]), mixture)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"data state: not readable ({type(error).__name__}: {error})") from error


@dataclass(frozen=True, eq=False)
class Microbatch:
    """b sequences of T tokens in the stored form; each property builds a new array.

    `samples`: int64[b], sample numbers of the run (in an evaluation: of the split, with -1 for a padded row).
    """

    samples: Ints
    rows: SampleRows

    @property
    def inputs(self) -> Ints:
        """Input tokens, int64[b, T]."""
        return self.rows.to_inputs()

    @property
    def targets(self) -> Ints:
        """Token after each input, int64[b, T]; -100 outside the loss."""
        return self.rows.to_targets()

    @property
    def document_ids(self) -> Ints | None:
        """Document of each input, int64[b, T], numbered from 0 in each row; None if attention is not restricted."""
        return None if self.rows.document_ids is None else self.rows.document_ids[:, :-1].astype(np.int64)

    @property
    def valid_tokens(self) -> int:
        """Number of targets in the loss."""
        return int((self.targets != IGNORE_INDEX).sum())

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return self.samples.nbytes + self.rows.nbytes


@dataclass(frozen=True, eq=False)
class Block:
    """Consecutive microbatches: their sample numbers int64[n] and their content."""

    samples: Ints
    rows: SampleRows

    def split_microbatches(self, size: int) -> Iterator[Microbatch]:
        """Split into microbatches of `size` samples."""
        for block in self.split(size):
            yield Microbatch(block.samples, block.rows)

    def split(self, size: int) -> Iterator[Block]:
        """Split into blocks of at most `size` samples without copying."""
        for first in range(0, len(self.samples), size):
            rows = slice(first, first + size)
            yield Block(self.samples[rows], self.rows.select(rows))

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return self.samples.nbytes + self.rows.nbytes


class Stream(ABC):
    """Source of the microbatches of a rank."""

    micro_batch_size: int

    @abstractmethod
    def iter_blocks(self, steps: range, microbatches: range, max_microbatches: int) -> Generator[Block, None, None]:
        """Yield the logical `microbatches` of each step, in order, in blocks of at most `max_microbatches`.

        Raises DataError if a step or microbatch does not exist.
        """

    @abstractmethod
    def read_microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Read a logical microbatch in [0, V) of a step >= 0 in this process, whatever `iter_blocks` has delivered.

        Raises DataError if it does not exist.
        """

    def iter_microbatches(self, steps: range, microbatches: range) -> Generator[Microbatch, None, None]:
        """Yield the logical `microbatches` of each step one by one."""
        for block in self.iter_blocks(steps, microbatches, MAX_LOCATED_SAMPLES):
            yield from block.split_microbatches(self.micro_batch_size)


class LocalStream(Stream):
    """Stream that reads the token arrays in this process. Stateless: seeking to a step is free."""

    def __init__(
        self,
        dataset: Dataset,
        sampler: Sampler,
        mixtures: Sequence[Mixture],
        packing: Packing,
        *,
        global_batch_size: int,
        micro_batch_size: int,
    ):
        """Validate the batch sizes, in sequences. Raises DataError if the global one is no multiple of the other."""
        if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % micro_batch_size:
            raise DataError(
                f"train.micro_batch_size={micro_batch_size}: must divide train.global_batch_size={global_batch_size}"
            )
        self._dataset, self._sampler, self._mixtures, self._packing = dataset, sampler, tuple(mixtures), packing
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """Samples per epoch of each source; with order=random, start positions of each source."""
        return self._sampler.sizes

    @property
    def num_microbatches(self) -> int:
        """Number of logical microbatches per step, V."""
        return self.global_batch_size // self.micro_batch_size

    def get_samples(self, step: int, microbatch: int) -> Ints:
        """Return the sample numbers, int64[b], of a logical microbatch in [0, V). Raises DataError if out of range."""
        samples: Ints = self._list_samples([(step, microbatch)])[0]
        return samples

    def get_samples_of_steps(self, steps: range, microbatches: range) -> Ints:
        """Return the sample numbers, int64[n], of the logical `microbatches` of each step."""
        return self._list_samples([(step, microbatch) for step in steps for microbatch in microbatches]).reshape(-1)

    def read_microbatch(self, step: int, microbatch: int) -> Microbatch:
        """Implement `Stream.read_microbatch`."""
        samples, source, positions = self._locate([(step, microbatch)])
        return Microbatch(samples, self._read(source, positions))

    def get_positions(self, step: int, microbatch: int) -> Ints:
        """Return the position in its source of each sample of a logical microbatch, int64[b]."""
        return self._locate([(step, microbatch)])[2]

    def read_block(self, steps: range, microbatches: range) -> Block:
        """Read the logical `microbatches` of each step in one call."""
        samples, source, positions = self._locate([(step, microbatch) for step in steps for microbatch in microbatches])
        return Block(samples, self._read(source, positions))

    def iter_blocks(self, steps: range, microbatches: range, max_microbatches: int) -> Generator[Block, None, None]:
        """Implement `Stream.iter_blocks`: samples are located in large batches and read in smaller ones."""
        max_read = max(1, MAX_READ_TOKENS // (self._packing.seq_len * self.micro_batch_size))
        num_read = 1  # the consumer waits for the first read: start small, then double
        pairs = ((step, microbatch) for step in steps for microbatch in microbatches)
        while batch := list(islice(pairs, max(1, MAX_LOCATED_SAMPLES // self.micro_batch_size))):
            samples, source, positions = self._locate(batch)
            first = 0
            while first < len(samples):
                rows = slice(first, first + num_read * self.micro_batch_size)
                block = Block(samples[rows], self._read(source[rows], positions[rows]))
                yield from block.split(max_microbatches * self.micro_batch_size)
                first, num_read = rows.stop, min(2 * num_read, max_read)

    def _list_samples(self, microbatches: Sequence[tuple[int, int]]) -> Ints:
        """Enumerate the sample numbers of (step, microbatch) pairs, int64[n, b]. Raises DataError if out of range."""
        count = self.num_microbatches
        for step, microbatch in microbatches:
            if step < 0 or not 0 <= microbatch < count:
                raise DataError(f"microbatch {microbatch} of step {step}: a step has microbatches 0..{count - 1}")
        firsts = [
            step * self.global_batch_size + microbatch * self.micro_batch_size for step, microbatch in microbatches
        ]
        return np.array(firsts, dtype=np.int64)[:, None] + np.arange(self.micro_batch_size)

    def _locate(self, microbatches: Sequence[tuple[int, int]]) -> tuple[Ints, Ints, Ints]:
        """Return number, source and position of every sample of (step, microbatch) pairs, int64[n] each."""
        samples = self._list_samples(microbatches)
        numbers = samples.reshape(-1)
        if self._sampler.kind == "random":
            draws = [
                self._sampler.locate_random(step, microbatch, row)
                for (step, microbatch), row in zip(microbatches, samples, strict=True)
            ]
            return (
                numbers,
                np.concatenate([source for source, _ in draws]),
                np.concatenate([positions for _, positions in draws]),
            )
        source, sample_numbers = self._sampler.locate(numbers)
        return numbers, source, self._packing.locate(sample_numbers)

    def _read(self, source: Ints, positions: Ints) -> SampleRows:
        tokens = self._dataset.train
        present_sources = np.unique(source).tolist() if len(tokens) > 1 else [0]
        if len(present_sources) == 1:
            return self._packing.read(tokens[present_sources[0]], positions)
        indexes = [np.flatnonzero(source == s) for s in present_sources]
        parts = [
            self._packing.read(tokens[s], positions[rows]) for s, rows in zip(present_sources, indexes, strict=True)
        ]
        return merge_rows(indexes, parts)

    def get_state(self, step: int) -> DataState:
        """Return the data state after `step` committed steps, with the mixture stages that have begun."""
        dataset, sample = self._dataset, step * self.global_batch_size
        mixture = tuple(dict(source) for source in dataset.mixture)
        for index, source in enumerate(mixture):
            changes = [[m.first_sample, m.weights[index]] for m in self._mixtures[1:] if m.first_sample < sample]
            if changes:
                source["changes"] = changes
        return DataState(self._sampler.seed, sample, dataset.dataset_hash, mixture)

    def get_resume_step(self, state: DataState) -> int:
        """Return the step to resume from a saved state. Raises DataError if data or global batch differ."""
        step, remainder = divmod(state.next_sample, self.global_batch_size)
        current_state = self.get_state(step)
        for name, key in (("dataset_hash", "data.path"), ("mixture", "data.sources"), ("seed", "run.seed")):
            saved, current = getattr(state, name), getattr(current_state, name)
            if saved != current:
                raise DataError(
                    f"{key}: the run was trained with {name}={saved!r}, and these settings give {current!r}; set "
                    "it back, or choose another run.dir"
                )
        if remainder:
            raise DataError(
                f"data state: next_sample={state.next_sample} is not a multiple of train.global_batch_size="
                f"{self.global_batch_size}; use the global batch of the run that saved it"
            )
        return step


def open_stream(
    dataset: Dataset, data: DataConfig, *, seed: int, seq_len: int, global_batch_size: int, micro_batch_size: int
) -> LocalStream:
    """Open the training stream of a dataset. Raises DataError if a source has no sample or batch sizes are invalid."""
    packing = build_packing(data.packing, seq_len)
    for index, source in enumerate(dataset.train):
        key, path = "data.path", data.path
        if data.sources:
            key, path = f"data.sources[{index}].path", data.sources[index].path
        check_source(packing, source, f"{key}={parse_location(path)}")
    count = packing.count_start_positions if data.order == "random" else packing.count_samples
    mixtures = build_mixtures(dataset, data, seq_len)
    sampler = Sampler([count(source) for source in dataset.train], mixtures, kind=data.order, seed=seed)
    return LocalStream(
        dataset, sampler, mixtures, packing, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size
    )


def build_mixtures(dataset: Dataset, data: DataConfig, seq_len: int) -> list[Mixture]:
    """Build the mixtures: the weights of the sources, then of `data.stages`, each from a whole block on."""
    stages = [
        Mixture(
            -(-stage.from_tokens // (seq_len * MIXTURE_BLOCK_SAMPLES)) * MIXTURE_BLOCK_SAMPLES, tuple(stage.weights)
        )
        for stage in data.stages
    ]
    return [Mixture(0, dataset.weights), *stages]


@dataclass(frozen=True)
class StreamSpec:
    """Picklable specification from which any process opens the same training stream.

    `dataset_hash`: that of the dataset with which the driver started the run; None: any dataset is accepted.
    """

    data: DataConfig
    vocab_size: int
    seed: int
    seq_len: int
    global_batch_size: int
    micro_batch_size: int
    dataset_hash: str | None = None

    def open_dataset(
        self, retry: ReadRetry = NO_RETRY, on_block: Callable[[], None] = lambda: None, *, check_files: bool = True
    ) -> Dataset:
        """Open the dataset, from the local cache if data.local_cache is set. Checksums were verified by the driver.

        `retry`: repeats reads that fail; `on_block`: called before each block that is copied to the local cache.
        `check_files`: whether to look for every shard, which takes a request for each in an object store. Raises
        DataError if it is not that of the driver: it was prepared again, or the nodes have different copies.
        """
        cache_dir = Path(self.data.local_cache) if self.data.local_cache else None
        dataset = open_dataset(
            self.data,
            vocab_size=self.vocab_size,
            seed=self.seed,
            verify_limit_bytes=0,
            cache_dir=cache_dir,
            check_files=check_files,
            retry=retry,
            on_block=on_block,
        )
        if self.dataset_hash not in (None, dataset.dataset_hash):
            key, paths = "data.path", [self.data.path]
            if self.data.sources:
                key, paths = "data.sources", [source.path for source in self.data.sources]
            raise DataError(
                f"{key}={', '.join(str(parse_location(path)) for path in paths)}: on node {socket.gethostname()}, the "
                f"dataset has the hash {dataset.dataset_hash}, and the run was started with {self.dataset_hash}; give "
                "every node the dataset of that hash, and start the run again"
            )
        return dataset

    def open_stream(self, dataset: Dataset) -> LocalStream:
        """Open the training stream of the dataset."""
        return open_stream(
            dataset,
            self.data,
            seed=self.seed,
            seq_len=self.seq_len,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
        )
