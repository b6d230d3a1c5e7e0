"""Split of a model's layers into pipeline stages that minimizes the cost of the slowest stage."""

from __future__ import annotations

from functools import lru_cache

from raytrain_hpc.config.model_spec import ModelSpec


def split_layers(spec: ModelSpec, seq_len: int, num_stages: int) -> list[range]:
    """Split the layers into contiguous stages of at least one layer each.

    The first stage also has the embedding, the last one the head. The cost of a stage is its multiplications per token:
    the weights of the matrix products, causal attention over the sequence, the head, and one pass over the embedding
    vectors. Of all splits with the cheapest slowest stage, the most even one is returned. Raises ValueError if there
    are more stages than layers.
    """
    layers = spec.num_layers
    if not 1 <= num_stages <= layers:
        raise ValueError(f"{num_stages} stages of {layers} layers")
    layer_cost = spec.count_active_matmul_parameters() + spec.attention_size * seq_len
    starts = _find_starts(layers, num_stages, layer_cost, spec.hidden_size, spec.hidden_size * spec.vocab_size)
    bounds = (*starts, layers)
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]


@lru_cache(maxsize=4096)  # a search asks for the same few splits thousands of times
def _find_starts(layers: int, num_stages: int, layer_cost: int, first_cost: int, last_cost: int) -> tuple[int, ...]:
    """Return the first layer of each stage. `first_cost`, `last_cost`: what the first and the last layer add."""

    def compute_cost(start: int, stop: int) -> int:
        return (stop - start) * layer_cost + first_cost * (start == 0) + last_cost * (stop == layers)

    # best[stop]: (slowest stage, sum of squares, starts of the stages) of the layers before `stop`.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for stage_count in range(1, num_stages + 1):
        extended = {}
        for stop in range(stage_count, layers - (num_stages - stage_count) + 1):
            extended[stop] = min(
                (max(slowest, compute_cost(start, stop)), squares + compute_cost(start, stop) ** 2, (*starts, start))
                for start, (slowest, squares, starts) in best.items()
                if start < stop
            )
        best = extended
    return best[layers][2]
