"""Sample number to (source, number in the source): the batch contract. Pure functions of (seed, sample); nothing is
stored or counted.

Sample g -> source: the mixture deals samples out in blocks of BLOCK, each with the same number of samples of every
source, in an order of its own. Weights can change between blocks (stages). Single sources skip this.
Source's i-th sample -> its number: epoch i // n, position i % n, through a permutation of its own a source and epoch.
What a numbered sample holds is the packing's affair.
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

MIXTURE_BLOCK_SAMPLES = (
    1024  # samples a mixture block: a weight is honoured to 1/1024, and every 1024 samples hold it exactly
)
FEISTEL_ROUNDS = 6  # of the Feistel network: neighbouring samples are then as unrelated as in a shuffled list

OrderName = Literal["shuffle", "sequential", "random"]
Ints = npt.NDArray[np.int64]
_ONE = np.uint64(1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # this and the next two: splitmix64 as published
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def derive_key(*parts: int | str) -> int:
    """A 64-bit key that belongs to `parts`: the first 8 bytes (little-endian) of blake2b over "part/part/..."."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The output of the splitmix64 generator at each state, uint64[n] -> uint64[n]: a hash, and a bijection."""
    z = state + _GOLDEN
    z = (z ^ (z >> _SHIFTS[0])) * _FACTORS[0]
    z = (z ^ (z >> _SHIFTS[1])) * _FACTORS[1]
    return z ^ (z >> _SHIFTS[2])


def generate_words(key: int, positions: Ints) -> npt.NDArray[np.uint64]:
    """Words of the splitmix64 stream seeded with `key`, at int64[n] positions: any of them at the same cost."""
    return splitmix64(np.uint64(key) + positions.astype(np.uint64) * _GOLDEN)


class Permutation:
    """A bijection on [0, n), computed an index at a time.

    A Feistel network of ROUNDS rounds over pairs (left, right) in [0, a) x [0, b), with a and b about sqrt(n) and a * b
    at least n. Rounds take turns: left += F(right) modulo a, right += F(left) modulo b, where F(x) is
    splitmix64(x ^ round key) and the round keys are the first words of the splitmix64 stream seeded with `key`. A
    result outside [0, n) goes through the network again until it falls inside (cycle walking), which keeps it a
    bijection. Pairs of numbers instead of the usual halves of a bit string leave less than a + b results outside,
    where powers of two would leave up to three quarters.
    """

    def __init__(self, n: int, key: int):
        """`n`: size, at least 1. `key`: in [0, 2**64); another key gives another permutation."""
        if n < 1:
            raise DataError(f"a permutation of {n} elements: needs at least 1")
        self.n = n
        a = isqrt(n - 1) + 1
        self._a, self._b = np.uint64(a), np.uint64(-(-n // a))
        self._keys = generate_words(key, np.arange(FEISTEL_ROUNDS))

    def __call__(self, index: Ints) -> Ints:
        """Images of index int64[m], each in [0, n)."""
        x = self._network(np.asarray(index).astype(np.uint64))
        outside = np.flatnonzero(x >= self.n)
        while outside.size:
            x[outside] = self._network(x[outside])
            outside = outside[x[outside] >= self.n]
        return x.astype(np.int64)

    def _network(self, x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = x // self._b, x % self._b
        for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
            # The lowest bit of a word is dropped so that the sum cannot leave 64 bits, which would break the bijection.
            left = (left + (splitmix64(right ^ even) >> _ONE)) % self._a
            right = (right + (splitmix64(left ^ odd) >> _ONE)) % self._b
        return left * self._b + right


def compute_block_counts(weights: Sequence[float], size: int = MIXTURE_BLOCK_SAMPLES) -> Ints:
    """How many of `size` samples each source gets, int64[sources], by largest remainder (ties go to the first).

    DataError for a weight below 0, a sum of 0, or a weight so small that its source would never be read.
    """
    if not all(0 <= w < float("inf") for w in weights) or not sum(weights):
        raise DataError(f"weights={list(weights)}: needs numbers of at least 0, and one above it")
    exact = [Fraction(w) for w in weights]  # fractions, so that no machine rounds a tie the other way
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
    """Weights of the sources from a sample on, which is rounded up to a whole block."""

    first_sample: int
    weights: tuple[float, ...]


class _MixtureStage:
    """The blocks that are dealt with the same weights."""

    def __init__(self, first_block: int, counts: Ints, samples_before: Ints):
        self.first_block, self.counts = first_block, counts
        self.samples_before = samples_before  # samples of each source that earlier stages dealt
        self.source_pattern = _spread_evenly(counts)


class Sampler:
    """Which sample of which source each sample of a run is. Knows no rank, no world size and no batch."""

    def __init__(self, sizes: Sequence[int], mixtures: Sequence[Mixture], *, kind: OrderName, seed: int):
        """`sizes`: samples of each source, at least 1 each; with kind=random, places where one can begin.

        `mixtures`: the first from sample 0 on, then ascending. DataError where they misfit or a weight cannot be
        honoured.
        """
        if not sizes or any(len(mixture.weights) != len(sizes) for mixture in mixtures):
            given = [len(mixture.weights) for mixture in mixtures]
            raise DataError(f"{len(sizes)} sources and {given} weights: must be as many, and at least one")
        if min(sizes) < 1:
            raise DataError(f"source {list(sizes).index(min(sizes))}: holds no sample")
        self.kind, self.seed, self.sizes = kind, seed, tuple(sizes)
        self._stages = _build_stages(mixtures)

    def locate(self, samples: Ints) -> tuple[Ints, Ints]:
        """Source int64[n] and number in it int64[n] of samples int64[n], for shuffle and sequential."""
        if self.kind == "random":
            raise DataError("order=random draws its windows by step and microbatch: use locate_random")
        samples = np.asarray(samples, dtype=np.int64)
        source, index = self._assign_sources(samples)
        number = np.empty_like(samples)
        for s in np.unique(source):
            mine = source == s
            number[mine] = self._get_sample_numbers(int(s), index[mine])
        return source, number

    def locate_random(self, step: int, microbatch: int, samples: Ints) -> tuple[Ints, Ints]:
        """Source int64[n] and place int64[n] of what a logical microbatch draws at a step; `samples` int64[n] are its
        numbers in the run.

        With replacement, any place in [0, size). Microbatch v has its own stream of words, keyed by (seed, v); draw j
        of step k uses words 2 * (k * n + j), for the source, and the one after, for the place.
        """
        key = derive_key(self.seed, "random", microbatch)
        draws = 2 * (np.int64(step) * samples.size + np.arange(samples.size, dtype=np.int64))
        # An entry of the even deal, drawn at random, has the weights of a mixture block.
        entries = (generate_words(key, draws) % np.uint64(MIXTURE_BLOCK_SAMPLES)).astype(np.int64)
        evens = np.stack([stage.source_pattern for stage in self._stages])
        source = evens[self._find_stages(samples // MIXTURE_BLOCK_SAMPLES), entries]
        # Modulo of 64 bits: for 2**40 places none is likelier than another by more than one part in 2**24.
        spans = np.array(self.sizes, dtype=np.uint64)[source]
        return source, (generate_words(key, draws + 1) % spans).astype(np.int64)

    def _assign_sources(self, samples: Ints) -> tuple[Ints, Ints]:
        """Source of each sample, and its number among that source's samples."""
        if len(self.sizes) == 1:
            return np.zeros_like(samples), samples
        source, index = np.empty_like(samples), np.empty_like(samples)
        blocks, positions = samples // MIXTURE_BLOCK_SAMPLES, samples % MIXTURE_BLOCK_SAMPLES
        for block in np.unique(blocks).tolist():
            mine = blocks == block
            stage = self._stages[int(self._find_stages(np.array([block]))[0])]
            dealt = self._get_block_sources(stage, block)
            source[mine] = chosen = dealt[positions[mine]]
            earlier = _count_earlier(dealt, stage.counts)[positions[mine]]
            index[mine] = stage.samples_before[chosen] + (block - stage.first_block) * stage.counts[chosen] + earlier
        return source, index

    def _find_stages(self, blocks: Ints) -> Ints:
        first = [stage.first_block for stage in self._stages]
        return np.searchsorted(first, blocks, side="right") - 1

    def _get_block_sources(self, stage: _MixtureStage, block: int) -> Ints:
        """The source of each position of a mixture block, int64[BLOCK]."""
        if self.kind == "sequential":
            return stage.source_pattern
        return stage.source_pattern[
            Permutation(MIXTURE_BLOCK_SAMPLES, derive_key(self.seed, "mixture", block))(
                np.arange(MIXTURE_BLOCK_SAMPLES)
            )
        ]

    def _get_sample_numbers(self, source: int, index: Ints) -> Ints:
        """Which of its samples a source's index-th one is."""
        n = self.sizes[source]
        epochs, positions = index // n, index % n
        if self.kind == "sequential":
            return positions
        number = np.empty_like(index)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            permute = Permutation(n, derive_key(self.seed, "window", source, int(epoch)))
            number[mine] = permute(positions[mine])
        return number


def _build_stages(mixtures: Sequence[Mixture]) -> list[_MixtureStage]:
    stages: list[_MixtureStage] = []
    for mixture in mixtures:
        first, counts = -(-mixture.first_sample // MIXTURE_BLOCK_SAMPLES), compute_block_counts(mixture.weights)
        before = np.zeros_like(counts)
        if stages:
            last = stages[-1]
            before = last.samples_before + (first - last.first_block) * last.counts
        if first <= (stages[-1].first_block if stages else -1) or (not stages and first):
            raise DataError(
                f"mixture from sample {mixture.first_sample} on: stages begin at 0 and at least {MIXTURE_BLOCK_SAMPLES} samples apart"
            )
        stages.append(_MixtureStage(first, counts, before))
    return stages


def _spread_evenly(counts: Ints) -> Ints:
    """Sources spread evenly over a block: the j-th of a source's c samples at (j + 1/2) / c, ties to the first."""
    source = np.repeat(np.arange(len(counts)), counts)
    # One correctly rounded division: equal moments are equal floats, on every machine.
    moment = (2 * _count_earlier(source, counts) + 1) / (2 * counts[source])
    return source[np.lexsort((source, moment))]


def _count_earlier(source: Ints, counts: Ints) -> Ints:
    """How many times each entry's source came before it in the block, int64[BLOCK]."""
    order = np.argsort(source, kind="stable")
    first = np.cumsum(counts) - counts
    earlier = np.empty_like(source)
    earlier[order] = np.arange(source.size) - first[source[order]]
    return earlier
