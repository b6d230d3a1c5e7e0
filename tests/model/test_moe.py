"""Mixture of experts: balancing loss and bias against their formulas, experts without positions, load counts."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.model.decoder import Block, loss_sum
from raytrain_hpc.model.moe import MixtureOfExperts
from raytrain_hpc.training.expert_bias import ExpertBias

KEYS = {"num_experts": 5, "experts_per_token": 2, "load_balancing_weight": 0.3}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 18], [2, 7, 1, 8, 2, 8, 1, 8, 2, 0]])


def get_mixtures(decoder) -> list[MixtureOfExperts]:
    return [block.mlp for block in decoder.blocks().values()]


def compute_explicit_loss(decoder, weight: float, lengths=(10, 10)) -> torch.Tensor:
    """Return the cross entropy plus the balancing loss of each sequence, by equations 17 to 20 of DeepSeek-V3.

    `lengths`: of the sequences, without padding.
    """
    routings = []
    hooks = [
        mixture.router.register_forward_hook(lambda router, args, out: routings.append((router, args[0], out[0])))
        for mixture in get_mixtures(decoder)
    ]
    loss = loss_sum(decoder(TOKENS), TOKENS)
    for hook in hooks:
        hook.remove()
    for router, x, experts in routings:
        scores = (x @ router.weight.T).softmax(dim=-1)
        for sequence, length in enumerate(lengths):
            for expert in range(5):
                num_positions = (experts[sequence, :length] == expert).sum().double()
                frequency = 5 / (2 * length) * num_positions
                loss = loss + weight * length * frequency * scores[sequence, :length, expert].mean()
    return loss


def test_balancing_loss_has_the_gradient_of_its_formula(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS))
    reference = random_decoder(tiny("llama", **KEYS, load_balancing="none"))
    loss_sum(decoder(TOKENS), TOKENS).backward()
    compute_explicit_loss(reference, KEYS["load_balancing_weight"]).backward()
    for (name, parameter), reference_parameter in zip(decoder.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference_parameter.grad, rtol=1e-10, atol=1e-10, msg=name)
    unbalanced = random_decoder(tiny("llama", **KEYS, load_balancing="none"))
    loss_sum(unbalanced(TOKENS), TOKENS).backward()
    assert (
        unbalanced.layers["0"].mlp.router.weight.grad - reference.layers["0"].mlp.router.weight.grad
    ).abs().max() > 1e-3


def test_padding_of_a_sequence_does_not_count(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS))
    reference = random_decoder(tiny("llama", **KEYS, load_balancing="none"))
    counted = torch.arange(10) < torch.tensor([[6], [10]])
    loss_sum(decoder(TOKENS, counted=counted), TOKENS).backward()
    compute_explicit_loss(reference, KEYS["load_balancing_weight"], (6, 10)).backward()
    for (name, parameter), reference_parameter in zip(decoder.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference_parameter.grad, rtol=1e-10, atol=1e-10, msg=name)
    assert [int(mixture.router.load.sum()) for mixture in get_mixtures(decoder)] == [16 * 2] * 2


def test_padding_microbatches_do_not_count(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS))
    (0.0 * loss_sum(decoder(TOKENS, counted=torch.zeros(2, 10, dtype=torch.bool)), TOKENS)).backward()
    assert all(not parameter.grad.any() for parameter in decoder.parameters())
    assert all(not mixture.router.load.any() for mixture in get_mixtures(decoder))


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_route_is_counted_once(tiny, random_decoder, recomputed: bool):
    decoder = random_decoder(tiny("llama", **KEYS, load_balancing="bias"))
    if recomputed:
        for block in decoder.blocks().values():
            block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)
    for _ in range(3):
        loss_sum(decoder(TOKENS), TOKENS).backward()
    decoder.eval()
    loss_sum(decoder(TOKENS), TOKENS).backward()
    for mixture in get_mixtures(decoder):
        assert mixture.router.load.sum() == 3 * 20 * 2
        assert mixture.router.load.min() < mixture.router.load.max()


def test_the_bias_moves_against_the_load(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS, load_balancing="bias"))
    loads = [torch.tensor([10, 0, 4, 4, 2]), torch.tensor([4, 4, 4, 4, 4])]
    for mixture, load in zip(get_mixtures(decoder), loads, strict=True):
        mixture.router.load.copy_(load)
    ExpertBias([decoder], 0.25, None).update(torch.stack(loads))
    biases = [mixture.router.bias.tolist() for mixture in get_mixtures(decoder)]
    assert biases == [[-0.25, 0.25, 0.0, 0.0, 0.25], [0.0] * 5]
    assert all(not mixture.router.load.any() for mixture in get_mixtures(decoder))
    assert "layers.0.mlp.router.bias" in decoder.state_dict()  # so that routing in a resumed run is unchanged
    assert "layers.0.mlp.router.load" not in decoder.state_dict()


def test_the_bias_affects_selection_but_not_weights(tiny, random_decoder):
    router = get_mixtures(random_decoder(tiny("llama", **KEYS, load_balancing="bias")))[0].router
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    scores = (x @ router.weight.T).softmax(dim=-1)
    router.bias.copy_(torch.tensor([0.0, 0.0, 5.0, 9.0, 0.0]))
    experts, weights = router(x)
    assert experts.tolist() == [[[3, 2]] * 4]
    torch.testing.assert_close(weights[..., 0], scores[..., 3] / (scores[..., 3] + scores[..., 2]))


@pytest.mark.parametrize("favorite", [0, 4])
def test_experts_without_positions_have_zero_gradients(tiny, random_decoder, favorite: int):
    decoder = random_decoder(tiny("llama", **{**KEYS, "experts_per_token": 1}))
    for mixture in get_mixtures(decoder):
        mixture.router.bias[favorite] = 100.0
    loss_sum(decoder(TOKENS), TOKENS).backward()
    for mixture in get_mixtures(decoder):
        for parameter in mixture.experts.parameters():
            has_gradient = [bool(gradient.any()) for gradient in parameter.grad]
            assert has_gradient == [expert == favorite for expert in range(5)]


def test_bf16_routes_like_fp32(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS), torch.float32)
    block: Block = decoder.layers["0"]
    x = torch.randn(2, 10, 32)
    with torch.autocast("cpu", torch.bfloat16):
        experts, weights = block.mlp.router(x)
    fp32_experts, fp32_weights = block.mlp.router(x)
    assert torch.equal(experts, fp32_experts) and torch.equal(weights, fp32_weights)


def test_more_experts_per_token_than_experts_are_refused():
    with pytest.raises(ConfigError, match="model.experts_per_token=4 .*must not exceed model.num_experts=3"):
        load_config(None, ["model.num_experts=3", "model.experts_per_token=4"])
