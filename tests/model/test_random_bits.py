import math
from typing import Any

import pytest
import torch

from raytrain_hpc.state.keyed_rng import derive_position_keys, derive_sample_keys, derive_seed, fold_in, keyed_dropout

MASK = (1 << 64) - 1


def splitmix(state: int) -> int:
    """Return one draw of splitmix64, implemented from the paper."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def finalize(z: int) -> int:
    return splitmix(z - 0x9E3779B97F4A7C15)


WIDTH = 64  # elements per position


def make_masks(p: float, n: int, *, seed: int = 0, step: int = 0, layer: int = 0, site: int = 0, samples: int = 16):
    """Return standardized masks, float64 [samples, n]: mean 0 and variance 1 if the dropout rate is right."""
    keys = derive_position_keys(derive_sample_keys(seed, step, torch.arange(samples)), torch.arange(n // WIDTH))
    mask = (keyed_dropout(torch.ones(samples, n // WIDTH, WIDTH), p, fold_in(keys, layer), site) != 0).double()
    return (mask.view(samples, n) - (1 - p)) / math.sqrt(p * (1 - p))


def test_keys_are_splitmix64_of_seed_step_and_sample():
    samples = [0, 1, 12345678901234]
    keys = derive_sample_keys(1337, 42, torch.tensor(samples))
    constant = splitmix(splitmix(splitmix(1337) + 42))
    assert [key & MASK for key in keys.tolist()] == [finalize((g + constant) & MASK) for g in samples]
    folded = fold_in(keys, 7)
    expected = [finalize((key + splitmix(7)) & MASK) for key in keys.tolist()]
    assert [key & MASK for key in folded.tolist()] == expected


def test_the_mask_is_a_32_bit_hash_of_key_and_element():
    """Compare with the hash in Python integers, which checks wrapping and shifting of tensors."""
    key = int(derive_sample_keys(3, 4, torch.tensor([5]))[0])
    mixed = finalize((key + splitmix(2)) & MASK)
    expected = []
    for index in range(200):
        x = index ^ (mixed & 0xFFFFFFFF)
        x = ((x ^ (x >> 17)) * 0xED5AD4BB + (mixed >> 32)) & 0xFFFFFFFF
        x = ((x ^ (x >> 11)) * 0xAC4C1B51) & 0xFFFFFFFF
        x = ((x ^ (x >> 15)) * 0x31848BAB) & 0xFFFFFFFF
        signed = x - (1 << 32) if x >> 31 else x
        expected.append(signed >= round(0.3 * 2**32) - 2**31)
    mask = keyed_dropout(torch.ones(1, 200), 0.3, torch.tensor([key]), 2) != 0
    assert mask[0].tolist() == expected


def test_masks_do_not_depend_on_the_batch_split():
    x, keys = torch.randn(6, 5, 8), derive_sample_keys(0, 3, torch.arange(100, 106))
    full = keyed_dropout(x, 0.4, keys)
    for size in (1, 2, 4):
        parts = [keyed_dropout(a, 0.4, k) for a, k in zip(x.split(size), keys.split(size), strict=True)]
        assert torch.equal(torch.cat(parts), full)


def test_sequence_shards_have_their_slice_of_the_mask():
    x, keys, positions = torch.randn(3, 6, 8), derive_sample_keys(0, 3, torch.arange(3)), torch.arange(6)
    full = keyed_dropout(x, 0.4, derive_position_keys(keys, positions))
    for part in (positions[2:5], positions[[0, 5]], positions[:0]):
        assert torch.equal(keyed_dropout(x[:, part], 0.4, derive_position_keys(keys, part)), full[:, part])


def test_position_keys_are_splitmix64_of_sample_and_position():
    keys = derive_sample_keys(1, 2, torch.arange(3))
    expected = [[finalize((key + splitmix(t)) & MASK) for t in (0, 1, 4095)] for key in keys.tolist()]
    position_keys = derive_position_keys(keys, torch.tensor([0, 1, 4095])).tolist()
    assert [[key & MASK for key in row] for row in position_keys] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_mask_does_not_depend_on_the_dtype(dtype: torch.dtype):
    keys = derive_sample_keys(0, 3, torch.arange(3))
    mask = keyed_dropout(torch.ones(3, 1000), 0.1, keys) != 0
    dropped = keyed_dropout(torch.ones(3, 1000, dtype=dtype), 0.1, keys)
    assert dropped.dtype == dtype
    assert torch.equal(dropped != 0, mask)


def test_kept_elements_and_their_gradients_are_scaled():
    x = torch.randn(2, 1000, dtype=torch.float64, requires_grad=True)
    y = keyed_dropout(x, 0.25, derive_sample_keys(0, 0, torch.arange(2)))
    mask = y != 0
    torch.testing.assert_close(y[mask], x[mask] / 0.75)
    y.sum().backward()
    torch.testing.assert_close(x.grad, mask.double() / 0.75)


def test_probability_zero_returns_the_input():
    x = torch.randn(2, 3)
    assert keyed_dropout(x, 0.0, derive_sample_keys(0, 0, torch.arange(2))) is x


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_dropout_rate_is_the_probability(p: float):
    z = make_masks(p, 1 << 16).sum(1) / 2**8  # 16 standard normal values; the standard deviation of their mean is 1/4
    assert z.abs().max() < 4.5
    assert abs(z.mean()) < 1.1


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_other_seeds_steps_layers_sites_and_samples_are_independent(p: float):
    n = 1 << 16
    streams = [make_masks(p, n)]
    streams += [make_masks(p, n, **{part: 1}, samples=1) for part in ("seed", "step", "layer", "site")]
    # Layer and site must not be interchangeable; neither must step and sample.
    streams += [make_masks(p, n, layer=2, site=1, samples=1), make_masks(p, n, layer=1, site=2, samples=1)]
    z = torch.cat(streams)
    correlation = (z @ z.T / math.sqrt(n))[~torch.eye(len(z), dtype=torch.bool)]
    assert correlation.abs().max() < 4.8
    assert correlation.std() == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighboring_elements_are_independent(p: float):
    z = make_masks(p, 1 << 16)
    for lag in (1, 2, 3, 4, 8, 16, 64, 192, 256, 512, 768, 1024, 4096):
        correlation = (z[:, :-lag] * z[:, lag:]).sum() / math.sqrt(z[:, lag:].numel())
        assert abs(correlation) < 4.5, lag


def test_all_patterns_of_twelve_elements_are_equally_frequent():
    kept = (make_masks(0.5, 12 << 12) > 0).long()
    for patterns in (kept.view(-1, 12), kept.view(16, 12, -1).transpose(1, 2).reshape(-1, 12)):
        counts = torch.bincount(patterns @ 2 ** torch.arange(12), minlength=4096).double()
        chi_squared = ((counts - 16) ** 2 / 16).sum().item()
        assert abs(chi_squared - 4095) / math.sqrt(2 * 4095) < 4.5


def test_compiling_does_not_change_the_mask():
    compiled = torch.compile(keyed_dropout, backend="aot_eager", fullgraph=True)
    x, keys = torch.randn(2, 4, 8), derive_sample_keys(0, 0, torch.arange(2))
    assert torch.equal(compiled(x, 0.3, keys, 1), keyed_dropout(x, 0.3, keys, 1))


def test_sites_are_constants_of_compiled_code():
    """A number that differs from call to call becomes a variable, on which 64-bit arithmetic fails in generated C++."""
    inputs: list[Any] = []

    def keep_inputs(graph: Any, example_inputs: list[Any]) -> Any:
        inputs.extend(example_inputs)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(keyed_dropout, backend=keep_inputs)
    x, keys = torch.randn(2, 4, 8), derive_sample_keys(0, 0, torch.arange(2))
    for site in range(3):
        assert torch.equal(compiled(x, 0.3, keys, site), keyed_dropout(x, 0.3, keys, site))
    assert len(inputs) >= 6 and all(type(value) is torch.Tensor for value in inputs)


def test_derived_seeds_depend_on_every_part():
    seeds = [
        derive_seed(1),
        derive_seed("1"),
        derive_seed(1, 2),
        derive_seed(12),
        derive_seed(2, 1),
        derive_seed("ab", "c"),
    ]
    seeds += [derive_seed("a", "bc"), derive_seed("abc"), derive_seed(0, "layers.0"), derive_seed(1, "layers.0")]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(1337, "head.weight") == derive_seed(1337, "head.weight")
