import math

import pytest
import torch

from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.param_init import init_tensor, init_weights


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_weights_have_the_standard_deviation_of_their_kind(tiny, family: str):
    spec = tiny(family, hidden_size=128, num_layers=3, init_std=0.03, ffn_size=256)
    decoder = Decoder(spec)
    init_weights(decoder, seed=0)
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("out.weight", "down.weight"))
            std = 0.03 / math.sqrt(6) if residual else 0.03
            error = std / math.sqrt(
                2 * parameter.numel()
            )  # standard error of a standard deviation estimated from n numbers
            assert parameter.std().item() == pytest.approx(std, abs=4.5 * error), name
            assert abs(parameter.mean().item()) < 4.5 * std / math.sqrt(parameter.numel()), name


def test_initial_values_do_not_depend_on_the_order(tiny):
    spec = tiny("llama")
    decoder = Decoder(spec)
    sizes = {name: parameter.shape for name, parameter in decoder.named_parameters()}
    forward = {name: init_tensor(spec, name, size, 5) for name, size in sizes.items()}
    torch.manual_seed(99)
    backward = {name: init_tensor(spec, name, size, 5) for name, size in reversed(sizes.items())}
    init_weights(decoder, 5)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(forward[name], backward[name])
        assert torch.equal(forward[name], parameter)


def test_layers_and_seeds_differ(tiny):
    spec = tiny("llama")
    first = init_tensor(spec, "layers.0.mlp.up.weight", (32, 32), 0)
    assert not torch.equal(first, init_tensor(spec, "layers.1.mlp.up.weight", (32, 32), 0))
    assert not torch.equal(first, init_tensor(spec, "layers.0.mlp.up.weight", (32, 32), 1))


def test_initial_values_do_not_depend_on_meta_device_or_dtype(tiny):
    spec = tiny("llama")
    plain = Decoder(spec)
    init_weights(plain, 3)
    with torch.device("meta"):
        wide = Decoder(spec).double()
    wide.to_empty(device="cpu")
    init_weights(wide, 3)
    for a, b in zip(plain.parameters(), wide.parameters(), strict=True):
        assert torch.equal(a.double(), b)
    tokens = torch.arange(10).view(1, 10)
    torch.testing.assert_close(plain(tokens).double(), wide(tokens), rtol=1e-4, atol=1e-5)


def test_an_unknown_parameter_is_refused(tiny):
    with pytest.raises(ModelError, match=r"layers.0.router.gates: no initial value"):
        init_tensor(tiny("llama"), "layers.0.router.gates", (4, 4), 0)
