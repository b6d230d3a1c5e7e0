import pytest
import torch

from raytrain_hpc import text_generation
from raytrain_hpc.errors import ConfigError, DataError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.generate import generate
from raytrain_hpc.model.param_init import init_weights


class ConstantModel:
    """A model with constant logits that records its inputs."""

    def __init__(self, logits: list[float]):
        self.logits = torch.tensor(logits)
        self.windows: list[list[int]] = []

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        self.windows.append(tokens[0].tolist())
        return self.logits.expand(*tokens.shape, -1)


def test_the_same_seed_gives_the_same_tokens(tiny, random_decoder):
    decoder = random_decoder(tiny("llama"), torch.float32)
    first = list(generate(decoder, [1, 2], 30, context_length=8, seed=4))
    torch.manual_seed(0)
    assert list(generate(decoder, [1, 2], 30, context_length=8, seed=4)) == first
    assert list(generate(decoder, [1, 2], 30, context_length=8, seed=5)) != first
    assert len(first) == 30


def test_the_model_gets_the_last_tokens_of_the_context():
    model = ConstantModel([0.0, 0.0, 9.0])
    assert list(generate(model, [0, 1, 0], 3, context_length=4, temperature=0)) == [2, 2, 2]
    assert model.windows == [[0, 1, 0], [0, 1, 0, 2], [1, 0, 2, 2]]


def test_context_length_limits_learned_positions(tiny, random_decoder):
    decoder = random_decoder(tiny("gpt2"), torch.float32)
    assert len(list(generate(decoder, [1] * 20, 5, context_length=12))) == 5


def test_tokens_are_sampled_with_their_probabilities():
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    tokens = torch.tensor(
        list(generate(ConstantModel(probabilities.log().tolist()), [0], 2000, context_length=1, temperature=1.0))
    )
    torch.testing.assert_close(torch.bincount(tokens, minlength=3) / 2000, probabilities, rtol=0, atol=0.05)
    sharpened = probabilities**2 / (probabilities**2).sum()
    tokens = torch.tensor(
        list(generate(ConstantModel(probabilities.log().tolist()), [0], 2000, context_length=1, temperature=0.5))
    )
    torch.testing.assert_close(torch.bincount(tokens, minlength=3) / 2000, sharpened, rtol=0, atol=0.05)


def test_top_k_keeps_the_most_likely_tokens():
    tokens = set(generate(ConstantModel([1.0, 0.0, 2.0, 0.5]), [0], 200, context_length=1, temperature=2.0, top_k=2))
    assert tokens == {0, 2}
    tokens = set(generate(ConstantModel([1.0, 0.0, 2.0, 0.5]), [0], 200, context_length=1, temperature=2.0, top_k=0))
    assert tokens == {0, 1, 2, 3}


def test_gradients_stay_enabled_for_the_caller(tiny, random_decoder):
    for _ in generate(random_decoder(tiny("llama"), torch.float32), [1], 2, context_length=4):
        assert torch.is_grad_enabled()


def test_generation_applies_no_dropout(tiny):
    decoder = Decoder(tiny("llama", dropout=0.5))
    init_weights(decoder, 0)
    training = list(generate(decoder, [1], 10, context_length=4))
    assert list(generate(decoder.eval(), [1], 10, context_length=4)) == training


def test_invalid_settings_are_refused_at_the_call():
    model = ConstantModel([0.0, 1.0])
    with pytest.raises(DataError, match="at least one token"):
        generate(model, [], 1, context_length=4)
    for setting in ({"context_length": 0}, {"temperature": -1.0}, {"top_k": -1}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            generate(model, [0], 1, **{"context_length": 4, **setting})


def test_small_models_use_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_generation, "count_usable_cpus", lambda: 3)
    quickstart, gpt2 = 886_000 * 128, 124_000_000 * 1024
    assert [text_generation.choose_num_threads(work) for work in (quickstart, gpt2)] == [1, 3]
