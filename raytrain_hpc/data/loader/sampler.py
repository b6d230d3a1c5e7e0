"""Sampler: map a sample number of the run to a source and a sample number in it.

All functions are pure in (seed, sample): there is no state. The packing defines the content of a numbered sample.
Sample g -> source: the mixture assigns sources in blocks of MIXTURE_BLOCK_SAMPLES samples. Each block has the same
number of samples per source, in its own order. Weights can change between blocks (stages). Skipped for one source.
i-th sample of a source -> its number: epoch i // n, position i % n, mapped by a permutation per source and epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from raytrain_hpc.errors import DataError

MIXTURE_BLOCK_SAMPLES = 1024  # weights have a resolution of 1/1024 and hold exactly in every block
FEISTEL_ROUNDS = 6  # enough that neighboring samples are as uncorrelated as in a shuffled list

OrderName = Literal["shuffle", "sequential", "random"]
Ints = npt.NDArray[np.int64]
_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # this and the next two: splitmix64 as published
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def derive_key(*parts: int | str) -> int:
    """Derive a 64-bit key from `parts`: the first 8 bytes (little-endian) of blake2b over "part/part/..."."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the splitmix64 output function to each state, uint64[n] -> uint64[n]: a bijective hash."""
    z = state + _GOLDEN
    z = (z ^ (z >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


def generate_words(key: int, positions: Ints) -> npt.NDArray[np.uint64]:
    """Generate words of the splitmix64 stream seeded with `key` at positions int64[n], each at constant cost."""
    return splitmix64(np.uint64(key) + positions.astype(np.uint64) * _GOLDEN)


class Permutation:
    """Pseudorandom permutation of [0, n), evaluated per index without a table.

    A Feistel network of FEISTEL_ROUNDS rounds over pairs (left, right) in [0, a) x [0, b), with a and b about sqrt(n)
    and a * b at least n. Rounds alternate between left += F(right) modulo a and right += F(left) modulo b. F(x) is
    splitmix64(x ^ round key); the round keys are the first words of the splitmix64 stream seeded with `key`. Results
    outside [0, n) are fed through the network again until they are inside (cycle walking), which keeps the mapping
    bijective. With pairs of numbers, fewer than a + b results are outside; with halves of a bit string, up to three
    quarters would be.
    """

    def __init__(self, n: int, key: int):
        """Permute [0, n), n at least 1, as selected by `key` in [0, 2**64). Raises DataError if n is below 1."""
        if n < 1:
            raise DataError(f"a permutation of {n} elements: needs at least 1")
        self.n = n
        a = isqrt(n - 1) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-n // a))
        self._keys = generate_words(key, np.arange(FEISTEL_ROUNDS))

    def __call__(self, index: Ints) -> Ints:
        """Map index int64[m] to its images, each in [0, n)."""
        x = self._apply_network(np.asarray(index).astype(np.uint64))
        outside = np.flatnonzero(x >= self.n)
        while outside.size:
            x[outside] = self._apply_network(x[outside])
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64)

    def _apply_network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x // self._b, x % self._b
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            # Drop the lowest bit of a word so that the sum cannot overflow 64 bits, which would break the bijection.
            left = (left + (splitmix64(right ^ even) >> _ONE)) % self._a
            right = (right + (splitmix64(left ^ odd) >> _ONE)) % self._b
        return left * self._b + right


def compute_block_counts(weights: Sequence[float], size: int = MIXTURE_BLOCK_SAMPLES) -> Ints:
    """Compute the number of samples per source in a block of `size`, int64[sources], by largest remainder.

    Ties go to the first source. Raises DataError for a weight below 0, a sum of 0, or a positive weight too small to
    get a sample.
    """
    if not all(0 <= w < float("inf") for w in weights) or not sum(weights):
        raise DataError(f"weights={list(weights)}: must be at least 0, and one of them above 0")
    exact = [Fraction(w) for w in weights]  # exact: a tie must not depend on rounding
    shares = [w * size / sum(exact) for w in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    for weight, count in zip(weights, counts, strict=True):
        if weight and not count:
            raise DataError(
                f"weight={weight}: is below 1/{size} of all weights, so its source would never be read; raise it"
            )
    return np.array(counts, dtype=np.int64)


@dataclass(frozen=True)
class Mixture:
    """Weights of the sources, valid from `first_sample` rounded up to a whole block."""

    first_sample: int
    weights: tuple[float, ...]


class _MixtureStage:
    """Consecutive mixture blocks with the same weights."""

    def __init__(self, first_block: int, counts: Ints, samples_before: Ints):
        self.first_block, self.counts = first_block, counts
        self.samples_before = samples_before  # samples of each source in earlier stages
        self.source_pattern = _spread_evenly(counts)


class Sampler:
    """Mapping from the samples of a run to samples of its sources. Independent of ranks, world size and batches."""

    def __init__(self, sizes: Sequence[int], mixtures: Sequence[Mixture], *, kind: OrderName, seed: int):
        """Validate sizes and mixtures; `sizes` are samples per source, with kind=random start positions per source.

        `mixtures`: the first begins at sample 0, the others in ascending order. Raises DataError if sizes and weights
        do not match, a source is empty or a weight is invalid.
        """
        if not sizes or any(len(mixture.weights) != len(sizes) for mixture in mixtures):
            num_weights = [len(mixture.weights) for mixture in mixtures]
            raise DataError(f"{len(sizes)} sources and {num_weights} weights: numbers must be equal and at least 1")
        if min(sizes) < 1:
            raise DataError(f"source {list(sizes).index(min(sizes))}: holds no sample")
        self.kind, self.seed, self.sizes = kind, seed, tuple(sizes)
        self._stages = _build_stages(mixtures)

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return source int64[n] and sample number in it int64[n] of samples int64[n], for shuffle and sequential."""
        if self.kind == "random":
            raise DataError("order=random draws samples per step and microbatch; use locate_random")
        samples = np.asarray(samples, dtype=np.int64)
        source, index = self._assign_sources(samples)
        number = np.empty_like(samples)
        for source_index in np.unique(source):
            mask = source == source_index
            number[mask] = self._get_sample_numbers(int(source_index), index[mask])
        return source, number

    def locate_random(self, step: int, microbatch: int, samples: Ints) -> tuple[Ints, Ints]:
        """Draw source int64[n] and start position int64[n] of the samples of a logical microbatch, with replacement.

        `samples`: int64[n], their numbers in the run. Positions are in [0, size). Microbatch v has its own stream of
        words, keyed by (seed, v). Draw j of step k uses word 2 * (k * n + j) for the source and the next word for the
        position.
        """
        key = derive_key(self.seed, "random", microbatch)
        draws = 2 * (np.int64(step) * samples.size + np.arange(samples.size, dtype=np.int64))
        # A random entry of the source pattern follows the weights of the mixture block.
        entries = (generate_words(key, draws) % np.uint64(MIXTURE_BLOCK_SAMPLES)).astype(np.int64)
        patterns = np.stack([stage.source_pattern for stage in self._stages])
        source = patterns[self._find_stages(samples // MIXTURE_BLOCK_SAMPLES), entries]
        # Modulo bias of 64 bits: for 2**40 positions, probabilities differ by at most one part in 2**24.
        spans = np.array(self.sizes, dtype=np.uint64)[source]
        return source, (generate_words(key, draws + 1) % spans).astype(np.int64)

    def _assign_sources(self, samples: Ints) -> tuple[Ints, Ints]:
        """Return the source of each sample, and its index among the samples of that source."""
        if len(self.sizes) == 1:
            return np.zeros_like(samples), samples
        source, index = np.empty_like(samples), np.empty_like(samples)
        blocks, positions = samples // MIXTURE_BLOCK_SAMPLES, samples % MIXTURE_BLOCK_SAMPLES
        for block in np.unique(blocks).tolist():
            mask = blocks == block
            stage = self._stages[int(self._find_stages(np.array([block]))[0])]
            block_sources = self._get_block_sources(stage, block)
            source[mask] = sample_sources = block_sources[positions[mask]]
            earlier = _count_earlier(block_sources, stage.counts)[positions[mask]]
            index[mask] = (
                stage.samples_before[sample_sources]
                + (block - stage.first_block) * stage.counts[sample_sources]
                + earlier
            )
        return source, index

    def _find_stages(self, blocks: Ints) -> Ints:
        first_blocks = [stage.first_block for stage in self._stages]
        return np.searchsorted(first_blocks, blocks, side="right") - 1

    def _get_block_sources(self, stage: _MixtureStage, block: int) -> Ints:
        """Return the source of each position of a mixture block, int64[MIXTURE_BLOCK_SAMPLES]."""
        if self.kind == "sequential":
            return stage.source_pattern
        return stage.source_pattern[
            Permutation(MIXTURE_BLOCK_SAMPLES, derive_key(self.seed, "mixture", block))(
                np.arange(MIXTURE_BLOCK_SAMPLES)
            )
        ]

    def _get_sample_numbers(self, source: int, index: Ints) -> Ints:
        """Map indexes in the sample sequence of a source to sample numbers, shuffled per epoch unless sequential."""
        n = self.sizes[source]
        epochs, positions = index // n, index % n
        if self.kind == "sequential":
            return positions
        number = np.empty_like(index)
        for epoch in np.unique(epochs):
            mask = epochs == epoch
            permute = Permutation(n, derive_key(self.seed, "window", source, int(epoch)))
            number[mask] = permute(positions[mask])
        return number


def _build_stages(mixtures: Sequence[Mixture]) -> list[_MixtureStage]:
    stages: list[_MixtureStage] = []
    for mixture in mixtures:
        first, counts = -(-mixture.first_sample // MIXTURE_BLOCK_SAMPLES), compute_block_counts(mixture.weights)
        samples_before = np.zeros_like(counts)
        if stages:
            previous = stages[-1]
            samples_before = previous.samples_before + (first - previous.first_block) * previous.counts
        if first <= (stages[-1].first_block if stages else -1) or (not stages and first):
            raise DataError(
                f"mixture from sample {mixture.first_sample}: stages must begin at 0 and "
                f"at least {MIXTURE_BLOCK_SAMPLES} samples apart"
            )
        stages.append(_MixtureStage(first, counts, samples_before))
    return stages


def _spread_evenly(counts: Ints) -> Ints:
    """Spread sources evenly over a block: sample j of c goes to (j + 1/2) / c; ties go to the first source."""
    source = np.repeat(np.arange(len(counts)), counts)
    # One correctly rounded division: equal fractions give equal floats on every machine.
    fraction = (2 * _count_earlier(source, counts) + 1) / (2 * counts[source])
    return source[np.lexsort((source, fraction))]


def _count_earlier(source: Ints, counts: Ints) -> Ints:
    """Count the earlier entries with the same source in the block, int64[MIXTURE_BLOCK_SAMPLES]."""
    order = np.argsort(source, kind="stable")
    first = np.cumsum(counts) - counts
    earlier = np.empty_like(source)
    earlier[order] = np.arange(source.size) - first[source[order]]
    return earlier
