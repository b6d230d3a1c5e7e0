"""A second implementation of the decoder in NumPy, from the formulas of the papers, per head and position."""

import math

import numpy as np

from raytrain_hpc.config.model_spec import ModelSpec

Weights = dict[str, np.ndarray]


def compute_reference_logits(spec: ModelSpec, weights: Weights, tokens: list[int]) -> np.ndarray:
    """Return logits [t, vocab_size] of one sequence in float64, without dropout."""
    x = weights["embedding.weight"][tokens]
    if spec.position_embedding == "learned":
        x = x + weights["positions.weight"][: len(tokens)]
    for layer in range(spec.num_layers):
        part = {name.removeprefix(f"layers.{layer}."): w for name, w in weights.items()}
        x = x + _attention(spec, part, _norm(spec, part, "attention_norm", x))
        feed_forward = _mixture if spec.num_experts else _feed_forward
        x = x + feed_forward(spec, part, _norm(spec, part, "mlp_norm", x))
    x = _norm(spec, weights, "norm", x)
    return x @ weights["embedding.weight" if spec.tie_embeddings else "head.weight"].T


def _norm(spec: ModelSpec, weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    if spec.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + spec.norm_eps)
    return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0.0)


def _linear(weights: Weights, name: str, x: np.ndarray) -> np.ndarray:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0.0)


def _rotate(spec: ModelSpec, head: np.ndarray) -> np.ndarray:
    """Rotate channels i and i + d/2, as a complex number, by position * theta^(-2i/d)."""
    if spec.position_embedding != "rotary":
        return head
    half = head.shape[1] // 2
    rotated = np.empty_like(head)
    for position in range(len(head)):
        for i in range(half):
            angle = position * _frequency(spec, spec.rope_theta ** (-2.0 * i / head.shape[1]))
            number = complex(head[position, i], head[position, i + half]) * complex(math.cos(angle), math.sin(angle))
            rotated[position, i], rotated[position, i + half] = number.real, number.imag
    return rotated


def _frequency(spec: ModelSpec, frequency: float) -> float:
    """Scale one rotary frequency by the rule of Llama 3.1."""
    wavelength = 2 * math.pi / frequency
    longest, shortest = (
        spec.rope_original_max_positions / f for f in (spec.rope_low_freq_factor, spec.rope_high_freq_factor)
    )
    if spec.rope_factor == 1.0 or wavelength < shortest:
        return frequency
    if wavelength > longest:
        return frequency / spec.rope_factor
    rotations = spec.rope_original_max_positions / wavelength
    smooth = (rotations - spec.rope_low_freq_factor) / (spec.rope_high_freq_factor - spec.rope_low_freq_factor)
    return (1 - smooth) * frequency / spec.rope_factor + smooth * frequency


def _attention(spec: ModelSpec, weights: Weights, x: np.ndarray) -> np.ndarray:
    width, size = spec.head_dim, spec.kv_size
    qkv = _linear(weights, "attention.qkv", x)
    queries, keys, values = np.split(qkv, [spec.num_heads * width, spec.num_heads * width + size], axis=1)
    output = np.zeros_like(queries)
    for head in range(spec.num_heads):
        kv_head = head // (spec.num_heads // spec.num_kv_heads)
        q, k = queries[:, head * width : (head + 1) * width], keys[:, kv_head * width : (kv_head + 1) * width]
        if spec.qk_norm:
            q, k = _norm(spec, weights, "attention.q_norm", q), _norm(spec, weights, "attention.k_norm", k)
        q, k = _rotate(spec, q), _rotate(spec, k)
        v = values[:, kv_head * width : (kv_head + 1) * width]
        for position in range(len(x)):
            scores = k[: position + 1] @ q[position] / math.sqrt(width)
            exponentials = np.exp(scores - scores.max())
            output[position, head * width : (head + 1) * width] = exponentials / exponentials.sum() @ v[: position + 1]
    return _linear(weights, "attention.out", output)


def _feed_forward(spec: ModelSpec, weights: Weights, x: np.ndarray, name: str = "mlp") -> np.ndarray:
    up = _linear(weights, f"{name}.up", x)
    if spec.activation == "swiglu":
        gate = _linear(weights, f"{name}.gate", x)
        return _linear(weights, f"{name}.down", gate / (1 + np.exp(-gate)) * up)
    if spec.activation == "gelu_erf":
        erf = np.vectorize(math.erf)
        return _linear(weights, f"{name}.down", 0.5 * up * (1 + erf(up / math.sqrt(2))))
    gelu = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    return _linear(weights, f"{name}.down", gelu)


def _mixture(spec: ModelSpec, weights: Weights, x: np.ndarray) -> np.ndarray:
    """Apply each expert of each position as a dense feed-forward network."""
    output = np.zeros_like(x)
    for position in range(len(x)):
        logits = weights["mlp.router.weight"] @ x[position]
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        chosen = np.argsort(-probabilities)[: spec.experts_per_token]
        weight_sum = probabilities[chosen].sum() if spec.experts_per_token > 1 else 1.0
        for expert in chosen:
            expert_weights = {
                f"expert.{matrix}.weight": weights[f"mlp.experts.{matrix}"][expert]
                for matrix in ("up", "gate", "down")
                if f"mlp.experts.{matrix}" in weights
            }
            expert_output = _feed_forward(spec, expert_weights, x[position : position + 1], "expert")[0]
            output[position] += probabilities[expert] / weight_sum * expert_output
    return output + _feed_forward(spec, weights, x, "mlp.shared") if spec.shared_expert_size else output
