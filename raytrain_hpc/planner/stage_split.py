"""Which layers a pipeline stage has: runs of layers whose slowest stage is as fast as can be."""

from __future__ import annotations

from raytrain_hpc.config.model_spec import ModelSpec


def split_layers(shape: ModelSpec, seq_len: int, num_stages: int) -> list[range]:
    """The layers of every stage, at least one each; the first also has the embedding, the last the head.

    Costs are multiplications a token: weights of the products, causal attention over the sequence, the head's product,
    and for the embedding one pass over its vectors. Of all contiguous splits one with the cheapest slowest stage, and
    among those the most even one. Raises ValueError where there are more stages than layers.
    """
    layers = shape.num_layers
    if not 1 <= num_stages <= layers:
        raise ValueError(f"{num_stages} stages of {layers} layers")
    layer = shape.num_active_matmul_parameters() + shape.attention_size * seq_len
    first, last = shape.hidden_size, shape.hidden_size * shape.vocab_size

    def cost(start: int, stop: int) -> int:
        return (stop - start) * layer + first * (start == 0) + last * (stop == layers)

    # best[stop]: (slowest stage, sum of squares, starts of the stages) of the layers before `stop`.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for made in range(1, num_stages + 1):
        later = {}
        for stop in range(made, layers - (num_stages - made) + 1):
            later[stop] = min(
                (max(slowest, cost(start, stop)), squares + cost(start, stop) ** 2, (*starts, start))
                for start, (slowest, squares, starts) in best.items()
                if start < stop
            )
        best = later
    bounds = (*best[layers][2], layers)
    return [range(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
