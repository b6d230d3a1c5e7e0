"""Initial weights drawn by several threads are those drawn by one, on every rank of a layout."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

SIZES = ["model.hidden_size=256", "model.ffn_size=1024", "model.vocab_size=2048", "model.num_layers=2"]
EXPERTS = ["model.norm=rmsnorm", "model.activation=swiglu", "model.position_embedding=rotary", "model.num_experts=4"]
LAYOUTS = {
    "one rank, bf16": ["cluster.workers=1", "train.dtype=bf16", "model.tie_embeddings=true"],
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "zero3-2, ep-2": ["cluster.workers=2", *EXPERTS, "parallel.zero=3", "parallel.ep=2"],
    "zero1-2 x pp-2": ["cluster.workers=4", "parallel.zero=1", "parallel.pp=2"],
    "lora": ["cluster.workers=2", "parallel.zero=3", "lora.rank=4"],
}


def build_weights(rank: int, rendezvous: Any, spec: Any) -> tuple[dict[str, torch.Tensor], set[str]]:
    """Build the trainer on a node of three CPUs. Return this rank's slices, and the names of the drawing threads."""
    from raytrain_hpc.model import param_init
    from raytrain_hpc.runtime.control_channel import ControlChannel
    from raytrain_hpc.state.sharded_state import get_local_slice
    from raytrain_hpc.training import train_module
    from raytrain_hpc.training.builder import build_trainer

    threads, init_tensor = set(), param_init.init_tensor

    def init_and_record(*arguments: Any) -> torch.Tensor:
        threads.add(threading.current_thread().name)
        return init_tensor(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(param_init, "count_usable_cpus", lambda: 3)
        patch.setattr(train_module, "init_tensor", init_and_record)
        model = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel()).model_step.model
    return {name: get_local_slice(tensor)[2].detach().clone() for name, tensor in model.parameters.items()}, threads


@pytest.mark.parametrize("layout", LAYOUTS)
def test_threads_keep_the_initial_weights(pool: WarmPool, layout: str) -> None:
    config = make_small_config(None, *SIZES, *LAYOUTS[layout])
    world_size = int(config.cluster.workers)
    spec = make_worker_spec(config, world_size, steps_to=1)
    results = [
        pool.call(build_weights, world_size, replace(spec, max_ranks_per_node=ranks_per_node))
        for ranks_per_node in (1, 3)
    ]
    for (weights, threads), (serial_weights, serial_threads) in zip(*results, strict=True):
        assert any(name.startswith("param-init") for name in threads) and len(serial_threads) == 1
        assert weights.keys() == serial_weights.keys()
        for name, serial in serial_weights.items():
            assert torch.equal(weights[name], serial), name
            is_constant = any(part in name for part in ("bias", "norm", "lora_B"))
            assert is_constant or serial.unique().numel() > 1, f"{name} was never drawn"
