"""The decoder written a second time, in numpy, from the papers' formulas, head by head and position by position."""

import math

import numpy as np

from raytrain_hpc.config.model_spec import ModelSpec

Weights = dict[str, np.ndarray]


def reference_logits(shape: ModelSpec, weights: Weights, tokens: list[int]) -> np.ndarray:
    """Logits [t, vocab_size] in float64 of one sequence, without dropout."""
    x = weights["embedding.weight"][tokens]
    if shape.positions == "learned":
        x = x + weights["positions.weight"][: len(tokens)]
    for layer in range(shape.num_layers):
        part = {name.removeprefix(f"layers.{layer}."): w for name, w in weights.items()}
        x = x + _attention(shape, part, _norm(shape, part, "attention_norm", x))
        feed_forward = _mixture if shape.num_experts else _feed_forward
        x = x + feed_forward(shape, part, _norm(shape, part, "mlp_norm", x))
    x = _norm(shape, weights, "norm", x)
    return x @ weights["embedding.weight" if shape.tie_embeddings else "head.weight"].T


def _norm(shape: ModelSpec, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    if shape.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.norm_eps)
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)


def _linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _rotate(shape: ModelSpec, head: np.ndarray) -> np.ndarray:
    """Channels i and i + d/2 as a complex number, turned by position * theta^(-2i/d)."""
    if shape.positions != "rotary":
        return head
    half = head.shape[1] // 2
    turned = np.empty_like(head)
    for position in range(len(head)):
        for i in range(half):
            angle = position * _frequency(shape, shape.rope_theta ** (-2.0 * i / head.shape[1]))
            number = complex(head[position, i], head[position, i + half]) * complex(math.cos(angle), math.sin(angle))
            turned[position, i], turned[position, i + half] = number.real, number.imag
    return turned


def _frequency(shape: ModelSpec, frequency: float) -> float:
    """Llama 3.1's rule, wave by wave."""
    wavelength = 2 * math.pi / frequency
    longest, shortest = (shape.rope_original / f for f in (shape.rope_low_factor, shape.rope_high_factor))
    if shape.rope_factor == 1.0 or wavelength < shortest:
        return frequency
    if wavelength > longest:
        return frequency / shape.rope_factor
    turns = shape.rope_original / wavelength
    smooth = (turns - shape.rope_low_factor) / (shape.rope_high_factor - shape.rope_low_factor)
    return (1 - smooth) * frequency / shape.rope_factor + smooth * frequency


def _attention(shape: ModelSpec, weights: Weights, x: np.ndarray) -> np.ndarray:
    width, size = shape.head_dim, shape.kv_size
    qkv = _linear(weights, "attention.qkv", x)
    queries, keys, values = np.split(qkv, [shape.num_heads * width, shape.num_heads * width + size], axis=1)
    mixed = np.zeros_like(queries)
    for head in range(shape.num_heads):
        shared = head // (shape.num_heads // shape.num_kv_heads)
        q, k = queries[:, head * width : (head + 1) * width], keys[:, shared * width : (shared + 1) * width]
        if shape.qk_norm:
            q, k = _norm(shape, weights, "attention.q_norm", q), _norm(shape, weights, "attention.k_norm", k)
        q, k = _rotate(shape, q), _rotate(shape, k)
        v = values[:, shared * width : (shared + 1) * width]
        for position in range(len(x)):
            scores = k[: position + 1] @ q[position] / math.sqrt(width)
            likely = np.exp(scores - scores.max())
            mixed[position, head * width : (head + 1) * width] = likely / likely.sum() @ v[: position + 1]
    return _linear(weights, "attention.out", mixed)


def _feed_forward(shape: ModelSpec, weights: Weights, x: np.ndarray, name: str = "mlp") -> np.ndarray:
    up = _linear(weights, f"{name}.up", x)
    if shape.activation == "swiglu":
        gate = _linear(weights, f"{name}.gate", x)
        return _linear(weights, f"{name}.down", gate / (1 + np.exp(-gate)) * up)
    gelu = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return _linear(weights, f"{name}.down", gelu)


def _mixture(shape: ModelSpec, weights: Weights, x: np.ndarray) -> np.ndarray:
    """Each position asks each of its experts, as if that were a dense feed-forward."""
    made = np.zeros_like(x)
    for position in range(len(x)):
        logits = weights["mlp.router.weight"] @ x[position]
        likely = np.exp(logits - logits.max())
        likely /= likely.sum()
        chosen = np.argsort(-likely)[: shape.experts_per_token]
        share = likely[chosen].sum() if shape.experts_per_token > 1 else 1.0
        for expert in chosen:
            own = {
                f"one.{m}.weight": weights[f"mlp.experts.{m}"][expert]
                for m in ("up", "gate", "down")
                if f"mlp.experts.{m}" in weights
            }
            here = _feed_forward(shape, own, x[position : position + 1], "one")[0]
            made[position] += likely[expert] / share * here
    return made + _feed_forward(shape, weights, x, "mlp.shared") if shape.shared_expert_size else made
