"""Sample number to window: the batch contract. Pure functions of (seed, sample); nothing is stored or counted.

Sample g -> source: the mixture deals samples out in blocks of BLOCK, each with the same number of samples of every
source, in an order of its own. Single sources skip this.
Source's i-th sample -> window: epoch i // n, position i % n, through a permutation of its own a source and epoch.
Window w -> tokens [w * seq_len, w * seq_len + seq_len + 1): the last target is the next window's first input.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from fractions import Fraction
from math import isqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from raytrain_hpc.errors import DataError

BLOCK = 1024  # samples a mixture block: a weight is honoured to 1/1024, and every 1024 samples hold it exactly
ROUNDS = 6  # of the Feistel network: neighbouring samples are then as unrelated as in a shuffled list

Kind = Literal["shuffle", "sequential", "random"]
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


def random_words(key: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
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
        self._keys = random_words(key, np.arange(ROUNDS))

    def __call__(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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


def block_counts(weights: Sequence[float], size: int = BLOCK) -> npt.NDArray[np.int64]:
    """How many of `size` samples each source gets, int64[sources], by largest remainder (ties go to the first).

    DataError for a weight that is not above 0, or so small that its source would never be read.
    """
    if not weights or not all(0 < w < float("inf") for w in weights):
        raise DataError(f"weights={list(weights)}: every weight must be above 0")
    exact = [Fraction(w) for w in weights]  # fractions, so that no machine rounds a tie the other way
    shares = [w * size / sum(exact) for w in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: size - sum(counts)]:
        counts[i] += 1
    if min(counts) == 0:
        rare = weights[counts.index(0)]
        raise DataError(f"weight={rare}: is below 1/{size} of all weights, so its source would never be read; raise it")
    return np.array(counts, dtype=np.int64)


class Order:
    """Where each sample of a run lies. Knows no rank, no world size and no batch."""

    def __init__(self, num_tokens: Sequence[int], weights: Sequence[float], *, kind: Kind, seed: int, seq_len: int):
        """`num_tokens`: length of each source; `weights`: their shares; `kind`: shuffle, sequential or random.

        DataError where a source has no whole window of seq_len + 1 tokens, or a weight cannot be honoured.
        """
        if len(num_tokens) != len(weights) or not num_tokens:
            raise DataError(f"{len(num_tokens)} sources and {len(weights)} weights: must be as many, and at least one")
        for index, tokens in enumerate(num_tokens):
            if tokens < seq_len + 1:
                raise DataError(
                    f"source {index} holds {tokens} tokens and train.seq_len={seq_len} needs at least {seq_len + 1}: "
                    "use a smaller seq_len or more text"
                )
        self.kind, self.seed, self.seq_len = kind, seed, seq_len
        self.num_windows = tuple((tokens - 1) // seq_len for tokens in num_tokens)
        self._offsets = tuple(tokens - seq_len for tokens in num_tokens)
        self._counts = block_counts(weights)
        self._even = _even_deal(self._counts)

    def locate(self, samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source int64[n] and first token int64[n] of samples int64[n], for shuffle and sequential."""
        if self.kind == "random":
            raise DataError("order=random draws its windows by step and microbatch: use locate_random")
        samples = np.asarray(samples, dtype=np.int64)
        source, index = self._deal(samples)
        start = np.empty_like(samples)
        for s in np.unique(source):
            mine = source == s
            start[mine] = self._window(int(s), index[mine]) * self.seq_len
        return source, start

    def locate_random(
        self, step: int, microbatch: int, count: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source int64[count] and first token int64[count] of what a logical microbatch draws at a step.

        With replacement, any start in [0, tokens - seq_len). Microbatch v has its own stream of words, keyed by
        (seed, v); draw j of step k uses words 2 * (k * count + j), for the source, and the one after, for the start.
        """
        key = derive_key(self.seed, "random", microbatch)
        draws = 2 * (np.int64(step) * count + np.arange(count, dtype=np.int64))
        # An entry of the even deal, drawn at random, has the weights of a mixture block.
        source = self._even[(random_words(key, draws) % np.uint64(BLOCK)).astype(np.int64)]
        # Modulo of 64 bits: for 2**40 starts no start is likelier than another by more than one part in 2**24.
        spans = np.array(self._offsets, dtype=np.uint64)[source]
        return source, (random_words(key, draws + 1) % spans).astype(np.int64)

    def _deal(self, samples: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Source of each sample, and its number among that source's samples."""
        if len(self._counts) == 1:
            return np.zeros_like(samples), samples
        source, index = np.empty_like(samples), np.empty_like(samples)
        blocks, positions = samples // BLOCK, samples % BLOCK
        for block in np.unique(blocks):
            mine = blocks == block
            dealt = self._block_sources(int(block))
            source[mine] = dealt[positions[mine]]
            earlier = _occurrence(dealt, self._counts)[positions[mine]]
            index[mine] = block * self._counts[source[mine]] + earlier
        return source, index

    def _block_sources(self, block: int) -> npt.NDArray[np.int64]:
        """The source of each position of a mixture block, int64[BLOCK]."""
        if self.kind == "sequential":
            return self._even
        return self._even[Permutation(BLOCK, derive_key(self.seed, "mixture", block))(np.arange(BLOCK))]

    def _window(self, source: int, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The window that a source's index-th sample reads."""
        n = self.num_windows[source]
        epochs, positions = index // n, index % n
        if self.kind == "sequential":
            return positions
        window = np.empty_like(index)
        for epoch in np.unique(epochs):
            mine = epochs == epoch
            permute = Permutation(n, derive_key(self.seed, "window", source, int(epoch)))
            window[mine] = permute(positions[mine])
        return window


def _even_deal(counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sources spread evenly over a block: the j-th of a source's c samples at (j + 1/2) / c, ties to the first."""
    source = np.repeat(np.arange(len(counts)), counts)
    # One correctly rounded division: equal moments are equal floats, on every machine.
    moment = (2 * _occurrence(source, counts) + 1) / (2 * counts[source])
    return source[np.lexsort((source, moment))]


def _occurrence(source: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """How many times each entry's source came before it in the block, int64[BLOCK]."""
    order = np.argsort(source, kind="stable")
    first = np.cumsum(counts) - counts
    earlier = np.empty_like(source)
    earlier[order] = np.arange(source.size) - first[source[order]]
    return earlier
