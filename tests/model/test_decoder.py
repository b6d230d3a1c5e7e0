import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder, apply_rotary, loss_sum, make_rotary_tables
from raytrain_hpc.parallel.activation_checkpoint import apply_activation_checkpointing
from raytrain_hpc.state.keyed_rng import derive_sample_keys, keyed_dropout
from tests.model.reference_decoder import compute_reference_logits

TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 18], [2, 7, 1, 8, 2, 8, 1, 8, 2, 0]]
EXPERTS = {"num_experts": 5, "experts_per_token": 2, "shared_expert_size": 7}
QWEN3 = {"qk_norm": True, "head_dim": 6}
# Of four wavelengths (6, 30, 140 and 664 positions) one is short, one is long and two are in between.
SCALED_ROPE = {"rope_factor": 4.0, "rope_original_max_positions": 90, "rope_theta": 500.0, "rope_low_freq_factor": 0.5}
MIXED = {"rope_theta": 50.0, "norm": "layernorm", "bias": True, "tie_embeddings": True}


@pytest.mark.parametrize(
    "family, keys",
    [
        ("gpt2", {}),
        ("gpt2", {"bias": False, "num_kv_heads": 1}),
        ("gpt2", {"activation": "gelu_erf"}),
        ("llama", {}),
        ("llama", MIXED),
        ("llama", EXPERTS),
        ("llama", QWEN3),
        ("gpt2", {**QWEN3, "head_dim": 10}),
        ("llama", SCALED_ROPE),
        ("gpt2", {**EXPERTS, "experts_per_token": 1, "shared_expert_size": 0}),
    ],
)
def test_logits_equal_the_numpy_reference(tiny, random_decoder, family: str, keys: dict):
    spec = tiny(family, **keys)
    decoder = random_decoder(spec)
    logits = decoder(torch.tensor(TOKENS)).detach().numpy()
    weights = {name: parameter.detach().numpy() for name, parameter in decoder.named_parameters()}
    for row, tokens in zip(logits, TOKENS, strict=True):
        np.testing.assert_allclose(row, compute_reference_logits(spec, weights, tokens), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_token_does_not_change_earlier_logits(tiny, random_decoder, family: str):
    decoder = random_decoder(tiny(family))
    tokens = torch.tensor(TOKENS)
    before = decoder(tokens)
    tokens[:, 6] = (tokens[:, 6] + 1) % 19
    after = decoder(tokens)
    assert torch.equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any(dim=-1).all()


@pytest.mark.parametrize(
    "family, keys", [("gpt2", {}), ("llama", {}), ("llama", {**EXPERTS, "load_balancing": "none"}), ("llama", QWEN3)]
)
def test_gradients_equal_finite_differences(tiny, random_decoder, family: str, keys: dict):
    small = {"hidden_size": 8, "num_heads": 2, "num_kv_heads": 1, "ffn_size": 12, "dropout": 0.2}
    decoder = random_decoder(tiny(family, **small, **keys))
    tokens, targets = torch.tensor(TOKENS)[:, :-1], torch.tensor(TOKENS)[:, 1:]
    keys = derive_sample_keys(1, 2, torch.arange(2))
    loss_sum(decoder(tokens, keys), targets).backward()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in decoder.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        expected = (parameter.grad * direction).sum().item()
        with torch.no_grad():
            parameter.add_(1e-6 * direction)
            above = loss_sum(decoder(tokens, keys), targets).item()
            parameter.sub_(2e-6 * direction)
            below = loss_sum(decoder(tokens, keys), targets).item()
            parameter.add_(1e-6 * direction)
        assert (above - below) / 2e-6 == pytest.approx(expected, rel=1e-5, abs=1e-5), name


def test_rotary_scores_depend_on_the_distance_only(tiny):
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    tables = make_rotary_tables(torch.arange(50), tiny("llama"), torch.float64)
    rotated_q, rotated_k = (
        apply_rotary(q.expand(1, 50, 1, 8), tables)[0, :, 0],
        apply_rotary(k.expand(1, 50, 1, 8), tables)[0, :, 0],
    )
    scores = rotated_q @ rotated_k.T
    torch.testing.assert_close(scores[5:, :-5].diagonal(), scores[5, 0].expand(45))
    assert not torch.isclose(scores[5, 0], scores[6, 0])


def test_rotary_tables_of_a_bf16_model_are_exact(tiny):
    spec = tiny("llama", head_dim=64)
    cos, sin = make_rotary_tables(torch.arange(4000), spec, torch.bfloat16)
    assert cos.dtype == torch.float32
    exact_cos, exact_sin = make_rotary_tables(torch.arange(4000), spec, torch.float64)
    assert max((cos - exact_cos).abs().max(), (sin - exact_sin).abs().max()) < 1e-3
    x = torch.randn(1, 4000, 2, 64, dtype=torch.bfloat16)
    assert apply_rotary(x, (cos, sin)).dtype == torch.bfloat16


def test_loss_is_the_log_softmax_of_valid_targets(tiny):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 19, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[4, -100, 0], [-100, 18, -100]])
    loss = loss_sum(logits, targets)
    rows = [(0, 0, 4), (0, 2, 0), (1, 1, 18)]
    expected = sum(logits[b, t].exp().sum().log() - logits[b, t, target] for b, t, target in rows)
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert torch.equal(logits.grad[0, 1], torch.zeros(19, dtype=torch.float64))
    assert loss_sum(logits.bfloat16(), targets).dtype == torch.float32
    assert loss_sum(logits, torch.full((2, 3), -100)).item() == 0.0


def test_dropout_needs_training_mode_and_keys(tiny, random_decoder):
    decoder = random_decoder(tiny("gpt2", dropout=0.3))
    tokens, keys = torch.tensor(TOKENS), derive_sample_keys(0, 0, torch.arange(2))
    plain = decoder(tokens)
    assert not torch.allclose(decoder(tokens, keys), plain)
    decoder.eval()
    assert torch.equal(decoder(tokens, keys), plain)


def test_each_dropout_of_a_step_uses_different_bits(tiny, random_decoder, monkeypatch):
    used = []

    def record(x: torch.Tensor, p: float, keys: torch.Tensor, site: int = 0) -> torch.Tensor:
        used.extend((key, site) for key in keys.tolist())
        return keyed_dropout(x, p, keys, site)

    monkeypatch.setattr("raytrain_hpc.model.decoder.keyed_dropout", record)
    decoder = random_decoder(tiny("gpt2", dropout=0.3, num_layers=3))
    decoder(torch.tensor(TOKENS), derive_sample_keys(0, 0, torch.arange(2)))
    assert len(used) == len(set(used)) == 2 * (1 + 2 * 3)  # two samples; the embedding, and two branches per layer


def test_dropout_depends_on_the_sample_not_its_index_in_the_batch(tiny, random_decoder):
    decoder = random_decoder(tiny("llama", dropout=0.3))
    tokens, samples = torch.tensor(TOKENS), torch.tensor([40, 7])
    output = decoder(tokens, derive_sample_keys(0, 5, samples))
    swapped = decoder(tokens.flip(0), derive_sample_keys(0, 5, samples.flip(0)))
    torch.testing.assert_close(swapped.flip(0), output, rtol=1e-12, atol=1e-12)


def test_recomputing_every_block_gives_the_same_gradients(tiny, random_decoder):
    tokens, keys = torch.tensor(TOKENS), derive_sample_keys(0, 0, torch.arange(2))
    plain, recomputed = (random_decoder(tiny("llama", dropout=0.3)) for _ in range(2))
    loss_sum(plain(tokens, keys), tokens).backward()
    for block in recomputed.layers.values():
        forward = block.forward
        block.forward = lambda *args, f=forward: checkpoint(f, *args, use_reentrant=False, preserve_rng_state=False)
    loss_sum(recomputed(tokens, keys), tokens).backward()
    for (name, a), b in zip(plain.named_parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_all_blocks_compile_to_one_graph(tiny, random_decoder, policy: str):
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        graphs.append(graph)
        return graph.forward

    spec = tiny("llama", dropout=0.3, num_layers=4)
    tokens, keys = torch.tensor(TOKENS), derive_sample_keys(0, 0, torch.arange(2))
    decoder = random_decoder(spec)
    expected = decoder(tokens, keys)
    apply_activation_checkpointing(list(decoder.layers.values()), policy, keyed_randomness=True)
    for block in decoder.layers.values():
        block.compile(backend=count, fullgraph=True)
    assert torch.equal(decoder(tokens, keys), expected)
    assert len(graphs) == 1


def test_autocast_and_bf16_models_stay_close_to_fp32(tiny, random_decoder):
    decoder = random_decoder(tiny("llama"), torch.float32)
    tokens = torch.tensor(TOKENS)
    exact = loss_sum(decoder(tokens), tokens)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = loss_sum(decoder(tokens), tokens)
    low = loss_sum(decoder.bfloat16()(tokens), tokens)
    assert mixed.dtype == low.dtype == torch.float32
    torch.testing.assert_close(torch.stack([mixed, low]), exact.expand(2), rtol=0.03, atol=0.0)


def test_dense_decoders_have_no_buffers(tiny):
    assert not list(Decoder(tiny("llama")).buffers())
    assert not list(Decoder(tiny("gpt2")).buffers())


def test_too_many_tokens_for_learned_positions_are_refused(tiny):
    with pytest.raises(ModelError, match="13 tokens: the model has 12 positions"):
        Decoder(tiny("gpt2"))(torch.zeros(1, 13, dtype=torch.int64))
