"""A training loop without any parallelism or sharding, as the reference for optimizers under every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import Config
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.model.param_init import init_weights
from tests.parallel.layout_run import load_full_state
from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

STEPS = 3
BASE = [
    "train.dtype=fp64",
    "train.micro_batch_size=2",
    f"train.steps={STEPS}",
    "lr_scheduler.name=constant",
    "lr_scheduler.warmup_steps=0",
    "optimizer.lr=3e-3",
]
LAYOUTS = {
    "ddp-2": ["cluster.workers=2"],
    "ddp-3": ["cluster.workers=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero2-3": ["cluster.workers=3", "parallel.zero=2"],
    "zero3-3": ["cluster.workers=3", "parallel.zero=3"],
    "hsdp-2x2": ["cluster.workers=4", "parallel.zero=3", "parallel.dp_replicate=2", "parallel.dp_shard=2"],
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "tp-2 zero3-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3"],
    "cp-2": ["cluster.workers=2", "parallel.cp=2"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "pp-2 zero2-2": ["cluster.workers=4", "parallel.pp=2", "parallel.zero=2"],
    "ep-2": ["cluster.workers=2", "parallel.ep=2"],
    "ep-2 zero3-4": ["cluster.workers=4", "parallel.ep=2", "parallel.zero=3"],
}

Parameters = Mapping[str, nn.Parameter]
Update = Callable[[Parameters], None]


def train_dense(config: Config, make_update: Callable[[Parameters], Update]) -> dict[str, Tensor]:
    """Train the decoder of a config in this process, and return its weights.

    `make_update(parameters)` returns a function that updates them from their gradients: those of the mean loss of the
    global batch, clipped.
    """
    spec = make_worker_spec(config, 1, steps_to=STEPS)
    stream = spec.stream_spec.open_stream(spec.stream_spec.open_dataset())
    decoder = Decoder(spec.model_spec).double()
    init_weights(decoder, config.run.seed)
    parameters = dict(decoder.named_parameters())
    update = make_update(parameters)
    for step in range(config.train.steps):
        batches = [stream.read_microbatch(step, number) for number in range(spec.batching.count)]
        decoder.zero_grad()
        for batch in batches:
            loss_sum(decoder(torch.tensor(batch.inputs)), torch.tensor(batch.targets)).backward()
        num_tokens = sum(batch.valid_tokens for batch in batches)
        for parameter in parameters.values():
            if parameter.grad is not None:
                parameter.grad /= num_tokens
        nn.utils.clip_grad_norm_(decoder.parameters(), config.train.max_grad_norm)
        with torch.no_grad():
            update(parameters)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def train_layout(pool: WarmPool, directory: Path, *words: str) -> dict[str, Tensor]:
    """Train under a layout, and return the whole state by name after the last step."""
    pool.train(make_small_config(directory, *BASE, *words))
    return load_full_state(directory, STEPS)


def select_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a state by parameter name."""
    prefix = "model."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def measure_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the largest difference between two sets of weights with the same names."""
    assert actual.keys() == expected.keys()
    return max(float((actual[name] - expected[name]).abs().max()) for name in expected)
