"""Experts: the balancing loss and bias against their formulas, experts without positions, what is counted."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.model.decoder import Block, loss_sum
from raytrain_hpc.model.moe import MixtureOfExperts
from raytrain_hpc.training.expert_bias import ExpertBias

KEYS = {"num_experts": 5, "experts_per_token": 2, "balance_weight": 0.3}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 18], [2, 7, 1, 8, 2, 8, 1, 8, 2, 0]])


def mixtures(decoder) -> list[MixtureOfExperts]:
    return [block.mlp for block in decoder.blocks().values()]


def explicit_loss(decoder, weight: float) -> torch.Tensor:
    """Cross entropy and, as a term of its own, what DeepSeek-V3's equations 17 to 20 say of every sequence."""
    seen = []
    hooks = [
        one.router.register_forward_hook(lambda router, args, out: seen.append((router, args[0], out[0])))
        for one in mixtures(decoder)
    ]
    loss = loss_sum(decoder(TOKENS), TOKENS)
    for hook in hooks:
        hook.remove()
    for router, x, experts in seen:
        scores = (x @ router.weight.T).softmax(dim=-1)
        for sequence in range(len(TOKENS)):
            for expert in range(5):
                chosen = (experts[sequence] == expert).sum()
                frequency = 5 / (2 * 10) * chosen
                loss = loss + weight * 10 * frequency * scores[sequence, :, expert].mean()
    return loss


def test_the_balancing_loss_has_the_gradient_of_its_formula(tiny, random_decoder):
    ours = random_decoder(tiny("llama", **KEYS))
    plain = random_decoder(tiny("llama", **KEYS, balance="none"))
    loss_sum(ours(TOKENS), TOKENS).backward()
    explicit_loss(plain, KEYS["balance_weight"]).backward()
    for (name, mine), other in zip(ours.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-10, msg=name)
    without = random_decoder(tiny("llama", **KEYS, balance="none"))
    loss_sum(without(TOKENS), TOKENS).backward()
    assert (without.layers["0"].mlp.router.weight.grad - plain.layers["0"].mlp.router.weight.grad).abs().max() > 1e-3


def test_a_spare_microbatch_counts_for_nothing(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS))
    (0.0 * loss_sum(decoder(TOKENS, loss_weight=0.0), TOKENS)).backward()
    assert all(not parameter.grad.any() for parameter in decoder.parameters())
    assert all(not one.router.load.any() for one in mixtures(decoder))


@pytest.mark.parametrize("recomputed", [False, True])
def test_every_choice_is_counted_once(tiny, random_decoder, recomputed: bool):
    decoder = random_decoder(tiny("llama", **KEYS, balance="bias"))
    if recomputed:
        for block in decoder.blocks().values():
            block.forward = lambda *args, f=block.forward: checkpoint(f, *args, use_reentrant=False)
    for _ in range(3):
        loss_sum(decoder(TOKENS), TOKENS).backward()
    decoder.eval()
    loss_sum(decoder(TOKENS), TOKENS).backward()
    for one in mixtures(decoder):
        assert one.router.load.sum() == 3 * 20 * 2
        assert one.router.load.min() < one.router.load.max()


def test_the_bias_moves_against_the_load(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS, balance="bias"))
    loads = [torch.tensor([10, 0, 4, 4, 2]), torch.tensor([4, 4, 4, 4, 4])]
    for one, load in zip(mixtures(decoder), loads, strict=True):
        one.router.load.copy_(load)
    balance = ExpertBias([decoder], 0.25, None)
    balance.update()
    biases = [one.router.bias.tolist() for one in mixtures(decoder)]
    assert biases == [[-0.25, 0.25, 0.0, 0.0, 0.25], [0.0] * 5]
    assert all(not one.router.load.any() for one in mixtures(decoder))
    assert "layers.0.mlp.router.bias" in decoder.state_dict()  # a resumed run goes on choosing as it did
    assert "layers.0.mlp.router.load" not in decoder.state_dict()


def test_the_bias_decides_who_is_chosen_and_not_how_much(tiny, random_decoder):
    router = mixtures(random_decoder(tiny("llama", **KEYS, balance="bias")))[0].router
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    scores = (x @ router.weight.T).softmax(dim=-1)
    router.bias.copy_(torch.tensor([0.0, 0.0, 5.0, 9.0, 0.0]))
    experts, weights = router(x, 1.0)
    assert experts.tolist() == [[[3, 2]] * 4]
    torch.testing.assert_close(weights[..., 0], scores[..., 3] / (scores[..., 3] + scores[..., 2]))


@pytest.mark.parametrize("favourite", [0, 4])
def test_experts_that_get_no_position_have_gradients_of_zero(tiny, random_decoder, favourite: int):
    decoder = random_decoder(tiny("llama", **{**KEYS, "experts_per_token": 1}))
    for one in mixtures(decoder):
        one.router.bias[favourite] = 100.0
    loss_sum(decoder(TOKENS), TOKENS).backward()
    for one in mixtures(decoder):
        for parameter in one.experts.parameters():
            reached = [bool(gradient.any()) for gradient in parameter.grad]
            assert reached == [expert == favourite for expert in range(5)]


def test_bf16_routes_as_fp32_does(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", **KEYS), torch.float32)
    block: Block = decoder.layers["0"]
    x = torch.randn(2, 10, 32)
    with torch.autocast("cpu", torch.bfloat16):
        experts, weights = block.mlp.router(x, 1.0)
    exact, exact_weights = block.mlp.router(x, 1.0)
    assert torch.equal(experts, exact) and torch.equal(weights, exact_weights)


def test_more_choices_than_experts_are_refused():
    with pytest.raises(ConfigError, match="model.experts_per_token=4 .*must not exceed model.num_experts=3"):
        load_config(None, ["model.num_experts=3", "model.experts_per_token=4"])
