from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from raytrain_hpc.data.loader.sampler import (
    MIXTURE_BLOCK_SAMPLES,
    Mixture,
    Permutation,
    Sampler,
    compute_block_counts,
    derive_key,
    generate_words,
    splitmix64,
)
from raytrain_hpc.errors import DataError


def reference_splitmix64(seed, count):
    """Generate words as published, with plain integers."""
    mask, state, words = (1 << 64) - 1, seed, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        words.append(z ^ (z >> 31))
    return words


def test_splitmix64_matches_the_published_generator():
    assert splitmix64(np.array([0], dtype=np.uint64))[0] == 0xE220A8397B1DCDAF
    for seed in (0, 1234567, (1 << 64) - 1):
        assert generate_words(seed, np.arange(20)).tolist() == reference_splitmix64(seed, 20)
    assert reference_splitmix64(1234567, 2) == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize("sizes", [range(1, 301), [1000, 1024, 65_536, 99_991, 300_000]])
def test_permutation_is_a_bijection(sizes):
    for n in sizes:
        image = Permutation(n, derive_key("test", n))(np.arange(n))
        assert np.array_equal(np.sort(image), np.arange(n)), n


@pytest.mark.parametrize("n", [10**12 + 7, (1 << 53) + 1, (1 << 62) - 1])
def test_permutation_of_a_range_larger_than_memory(n):
    index = np.concatenate([np.arange(20_000), n - 1 - np.arange(20_000)])
    image = Permutation(n, 5)(index)
    assert image.min() >= 0
    assert image.max() < n
    assert np.unique(image).size == index.size


def test_permutation_depends_on_its_key_and_not_on_batching():
    image = Permutation(1000, 1)(np.arange(1000))
    assert (image != Permutation(1000, 2)(np.arange(1000))).mean() > 0.99
    assert [int(Permutation(1000, 1)(np.array([i]))[0]) for i in range(50)] == image[:50].tolist()
    with pytest.raises(DataError, match="at least 1"):
        Permutation(0, 1)


def compute_evenness(image, n, batch=512, parts=64):
    """Return chi-square per degree of freedom of batches over equal parts of [0, n), averaged over batches."""
    rows = image[: image.size // batch * batch].reshape(-1, batch) * parts // n
    counts = np.stack([np.bincount(row, minlength=parts) for row in rows])
    return float(((counts - batch / parts) ** 2 / (batch / parts)).sum(axis=1).mean() / (parts - 1))


def compute_serial_correlation(values):
    return float(np.corrcoef(values[:-1], values[1:])[0, 1])


@pytest.mark.parametrize("key", [1, 2])
def test_permutation_statistics_match_numpy(key):
    n = 1_000_000
    image = Permutation(n, key)(np.arange(n))
    reference = np.random.default_rng(key).permutation(n)
    for measure, expected, tolerance in (
        (compute_evenness, 1.0, 0.02),
        (lambda x, n: compute_serial_correlation(x), 0.0, 0.004),
    ):
        assert abs(measure(reference, n) - expected) < tolerance
        assert abs(measure(image, n) - expected) < tolerance
    assert abs(compute_serial_correlation(image & 1)) < 0.004
    distinct = [np.unique(np.diff(x)).size / n for x in (image, reference)]
    assert abs(distinct[0] - distinct[1]) < 0.002


def make_sampler(lengths, weights=None, kind="shuffle", seed=3, seq_len=10):
    """Build a sampler of windows over sources of the given lengths."""
    count = (lambda n: n - seq_len) if kind == "random" else (lambda n: (n - 1) // seq_len)
    mixtures = [Mixture(0, tuple(weights or [1.0] * len(lengths)))]
    return Sampler([count(n) for n in lengths], mixtures, kind=kind, seed=seed)


def test_every_window_is_read_once_per_epoch_for_any_batching():
    tokens, seq_len = 1008, 10
    windows = list(range(100))
    assert make_sampler([tokens]).sizes == ((tokens - 1) // seq_len,) == (100,)
    epochs = []
    for epoch in range(4):
        samples = np.arange(epoch * 100, (epoch + 1) * 100)
        batches = np.split(samples, np.cumsum(np.random.default_rng(epoch).integers(1, 20, 9)))
        starts = np.concatenate([make_sampler([tokens]).locate(batch)[1] for batch in batches])
        assert sorted(starts.tolist()) == windows
        epochs.append(starts.tolist())
    assert len({tuple(e) for e in epochs}) == 4
    assert epochs[0] != make_sampler([tokens], seed=4).locate(np.arange(100))[1].tolist()


def test_sequential_order_reads_in_stored_order_and_wraps_around():
    starts = make_sampler([51], kind="sequential").locate(np.arange(12))[1]
    assert starts.tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_mixture_is_exact_in_every_block_and_complete_in_every_epoch(kind):
    lengths, weights = [2001, 501, 30_001], [5, 1.0, 2]
    mixed = make_sampler(lengths, weights, kind)
    counts = compute_block_counts(weights)
    sources, starts = mixed.locate(np.arange(6 * MIXTURE_BLOCK_SAMPLES))
    for block in sources.reshape(6, MIXTURE_BLOCK_SAMPLES):
        assert np.bincount(block).tolist() == counts.tolist() == [640, 128, 256]
    for s, windows in enumerate(mixed.sizes):
        read = starts[sources == s]
        for epoch in range(len(read) // windows):
            assert np.unique(read[epoch * windows : (epoch + 1) * windows]).size == windows
    if kind == "sequential":
        assert starts[sources == 2].tolist() == list(range(6 * 256))
        assert np.bincount(sources[:16]).tolist() == [10, 2, 4]
    else:
        assert (
            sources[:MIXTURE_BLOCK_SAMPLES].tolist()
            != sources[MIXTURE_BLOCK_SAMPLES : 2 * MIXTURE_BLOCK_SAMPLES].tolist()
        )


def test_block_counts_follow_the_largest_remainder_method():
    generator = np.random.default_rng(0)
    for _ in range(50):
        weights = generator.uniform(0.5, 20, generator.integers(1, 9)).tolist()
        shares = [Fraction(w) * 100 / sum(map(Fraction, weights)) for w in weights]
        counts = compute_block_counts(weights, 100).tolist()
        assert sum(counts) == 100
        assert all(abs(c - share) < 1 for c, share in zip(counts, shares, strict=True))
    assert compute_block_counts([1, 1, 1], 4).tolist() == [2, 1, 1]
    assert compute_block_counts([1, 0, 1], 4).tolist() == [2, 0, 2]
    for weights in ([0, 0], [1, -1], [1, float("nan")], [1, float("inf")], []):
        with pytest.raises(DataError, match="at least 0, and one of them above 0"):
            compute_block_counts(weights)
    with pytest.raises(DataError, match=r"weight=0.0001: is below 1/1024"):
        compute_block_counts([1, 0.0001])


@pytest.mark.parametrize("kind", ["shuffle", "sequential"])
def test_locating_far_samples_is_consistent(kind):
    mixed = make_sampler([10**13, 5001], [3, 1], kind, seq_len=100)
    far = np.arange(10**15, 10**15 + 3000)
    sources, starts = mixed.locate(far)
    in_batches = [mixed.locate(far[i : i + 7]) for i in range(0, 3000, 7)]
    assert np.array_equal(np.concatenate([s for s, _ in in_batches]), sources)
    assert np.array_equal(np.concatenate([s for _, s in in_batches]), starts)
    assert starts.min() >= 0
    assert starts[sources == 0].max() * 100 + 101 <= 10**13
    assert starts[sources == 1].max() * 100 + 101 <= 5001


def test_random_draws_are_reproducible_independent_and_uniform():
    tokens, seq_len, samples = 1010, 10, np.arange(8)
    draws = make_sampler([tokens], kind="random")
    first = draws.locate_random(5, 3, samples)[1]
    assert np.array_equal(first, make_sampler([tokens], kind="random").locate_random(5, 3, samples)[1])
    others = [draws.locate_random(5, 4, samples), draws.locate_random(6, 3, samples)]
    others.append(make_sampler([tokens], kind="random", seed=4).locate_random(5, 3, samples))
    assert all(first.tolist() != start.tolist() for _, start in others)
    starts = np.concatenate(
        [draws.locate_random(k, v, samples)[1] for k in range(10**9, 10**9 + 1000) for v in range(5)]
    )
    counts = np.bincount(starts, minlength=tokens - seq_len)
    assert counts.size == tokens - seq_len  # the starts of full windows only
    expected = starts.size / counts.size
    assert abs(((counts - expected) ** 2 / expected).mean() - 1) < 0.15


def test_random_draws_follow_the_source_weights():
    draws = make_sampler([1010, 110], [3, 1], kind="random")
    drawn = [draws.locate_random(k, 0, np.arange(100)) for k in range(200)]
    sources = np.concatenate([s for s, _ in drawn])
    assert abs(Counter(sources.tolist())[1] / sources.size - 0.25) < 0.015
    assert max(start[source == 1].max() for source, start in drawn) == 99
    with pytest.raises(DataError, match="locate_random"):
        draws.locate(np.arange(3))


def test_mismatched_sources_and_weights_raise():
    assert make_sampler([11]).sizes == (1,)
    with pytest.raises(DataError, match="source 1: holds no sample"):
        make_sampler([11, 10])
    with pytest.raises(DataError, match="2 sources and \\[1\\] weights"):
        make_sampler([11, 11], [1.0])
