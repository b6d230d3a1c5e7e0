"""`parallelize`: the order in which dimensions are applied, and no effect of dimensions of size 1."""

from __future__ import annotations

import re

import torch

from raytrain_hpc.config.loader import load_config
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.parallel import parallelize
from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.parallel.context_parallel import apply_context_parallel
from raytrain_hpc.parallel.expert_parallel import apply_expert_parallel
from raytrain_hpc.parallel.gradient_sync import NoSync
from raytrain_hpc.parallel.sharded_lora import apply_lora
from raytrain_hpc.parallel.tensor_parallel import apply_tensor_parallel, list_partial_grads
from raytrain_hpc.parallel.tiled_linear import apply_tiling
from raytrain_hpc.planner.layout import Layout, resolve_layout
from tests.model_specs import make_model_spec


def test_dimensions_are_described_in_the_order_of_the_docstring() -> None:
    overrides = ["parallel.tp=2", "parallel.cp=2", "parallel.dp_shard=2", "parallel.dp_replicate=2", "parallel.zero=3"]
    config = load_config(
        None, [*overrides, "parallel.activation_checkpointing=full", "parallel.tile_mib=1", "cluster.workers=16"]
    )
    lines = parallelize.describe_parallelism(config, resolve_layout(config, 16))
    assert lines == [
        "tensor parallelism over 2 ranks",
        "context parallelism over 2 ranks, 1 of them by Ulysses",
        "tiling into about 262144 elements",
        "activation checkpointing: full",
        "ZeRO-3 over 2 ranks",
        "state replicated over 4 ranks (dp_replicate x cp)",
    ]
    numbered = re.findall(r"^\d\. (.*)$", parallelize.__doc__ or "", re.MULTILINE)
    order = ["tensor", "context", "tiling", "activation checkpointing"]
    assert [line for word in order for line in numbered if line.startswith(word)] == [
        line for line in numbered if line.startswith(tuple(order))
    ]


def test_a_single_rank_without_features_applies_nothing() -> None:
    config = load_config(None, ["cluster.workers=1"])
    assert parallelize.describe_parallelism(config, Layout()) == []


def test_dimensions_of_size_one_leave_a_decoder_as_it_is() -> None:
    spec = make_model_spec("model.num_experts=2", seq_len=8)
    with torch.device("meta"):
        decoder = Decoder(spec, range(spec.num_layers))
    modules, forwards = list(decoder.modules()), [module.forward for module in decoder.modules()]
    assert apply_expert_parallel(decoder, {}, is_elastic=False, tracer=ComputationTracer()) == {}
    assert apply_tensor_parallel(decoder, {}, 8) == {}
    assert list_partial_grads(decoder, {}, {}) == []
    apply_context_parallel(decoder, {}, 8)
    assert apply_lora(decoder, None, {}) == {}
    assert apply_tiling(decoder, 0, 1, {}) == {}
    assert list(decoder.modules()) == modules
    assert [module.forward for module in decoder.modules()] == forwards


def test_one_rank_gets_all_parameters_on_its_device_and_no_gradient_sync() -> None:
    config = load_config(None, ["cluster.workers=1"])
    spec = make_model_spec(seq_len=8)
    with torch.device("meta"):
        decoder = Decoder(spec, range(spec.num_layers))
    names = [name for name, _ in decoder.named_parameters()]
    model = parallelize.parallelize(
        {0: decoder},
        config=config,
        layout=Layout(),
        mesh=None,
        axes={},
        expert_mesh=None,
        device=torch.device("cpu"),
        reduction_orders=None,
        keyed_randomness=True,
    )
    assert list(model.parameters) == names and isinstance(model.gradient_sync, NoSync)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters.values())
    assert all(model.get_shard_spec(name).name == name for name in names)
