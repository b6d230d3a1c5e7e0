"""The optimizer of one rank: its class, the parameters it treats alike, and its connection to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.parameter_groups import check_patterns
from raytrain_hpc.config.schema import Config, LoraConfig
from raytrain_hpc.config.training_config import OPTIMIZER_NAMES
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.model.lora import LoraSpec
from raytrain_hpc.model.moe import Experts
from raytrain_hpc.optim.bf16_moments import Bf16Moments
from raytrain_hpc.optim.class_optimizer import ClassOptimizer
from raytrain_hpc.optim.matrix_exchange import MatrixExchange
from raytrain_hpc.optim.muon import Muon
from raytrain_hpc.optim.offload import MomentStorage, Slices, make_moment_storage
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
from raytrain_hpc.parallel.block_discovery import find_blocks
from raytrain_hpc.parallel.parallelize import ParallelModel
from raytrain_hpc.parallel.sharded_lora import apply_lora
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.state.shard_index import StateIndex
from raytrain_hpc.state.sharded_state import ShardedState
from raytrain_hpc.training.state_builder import ParameterSlice

_MOMENTUM_KIND = f"optimizer.{MOMENT_NAMES['muon'][0]}"


def build_optimizer(model: ParallelModel, spec: WorkerSpec, rank: int) -> Optimizer:
    """Return the optimizer that the settings name, over the slices of this rank, before its state is restored."""
    optimizer = _create_optimizer(model, spec.config, rank)
    optimizer.set_updates(spec.start_step)
    return optimizer


def _create_optimizer(model: ParallelModel, config: Config, rank: int) -> Optimizer:
    parameters, name = model.trainable_parameters, config.optimizer.name
    elastic = config.train.deterministic == "elastic"
    shard_specs = {local_name: model.get_shard_spec(local_name) for local_name in parameters}
    if name not in OPTIMIZER_NAMES:
        return ClassOptimizer(parameters, config, shard_specs, rank)
    canonical_names = {local_name: spec.name for local_name, spec in shard_specs.items()}
    make_storage = partial(_make_storage, config, rank)
    if name == "muon":
        matrices = find_hidden_matrices(model)
        return Muon(
            parameters,
            config.optimizer,
            matrices,
            elastic=elastic,
            canonical_names=canonical_names,
            make_storage=make_storage,
        )
    storage = make_storage(get_local_slices(parameters), MOMENT_NAMES[name])
    return Optimizer(parameters, config.optimizer, storage, elastic=elastic, canonical_names=canonical_names)


def _make_storage(config: Config, rank: int, slices: Slices, kinds: Sequence[str]) -> MomentStorage:
    if config.optimizer.moment_dtype == "fp32":
        return make_moment_storage(config, rank, slices, kinds)
    return Bf16Moments(make_moment_storage(config, rank, slices, kinds, torch.bfloat16))


def list_decoder_parameters(model_spec: ModelSpec, lora: LoraConfig) -> list[str]:
    """Return the names of all parameters of the built-in decoder, without allocating them."""
    with torch.device("meta"):
        decoder = Decoder(model_spec)
    adapters = LoraSpec(lora.rank, lora.alpha, tuple(lora.target_modules)) if lora.rank else None
    apply_lora(decoder, adapters, {})
    return [name for name, _ in decoder.named_parameters()]


def check_group_patterns(spec: WorkerSpec, indexes: list[StateIndex]) -> None:
    """Raise ConfigError if a pattern of optimizer.groups matches no parameter of a user's module on any rank.

    `indexes`: the state index of every rank. The driver has checked the patterns for the built-in decoder.
    """
    if spec.custom is not None and spec.config.optimizer.groups:
        prefix = "model."
        names = {name.removeprefix(prefix) for index in indexes for name in index if name.startswith(prefix)}
        check_patterns(spec.config, names)


def find_hidden_matrices(model: ParallelModel) -> dict[str, tuple[int, int]]:
    """Return rows and columns of the whole matrices that Muon updates, by local name.

    These are the trainable parameters of repeated blocks with two dimensions, other than embeddings, and the stacked
    weights of experts. Embeddings, heads, norms and biases are not among them.
    """
    blocks = [block for module in model.modules.values() for block in find_blocks(module)]
    submodules = [submodule for block in blocks for submodule in block.modules()]
    in_blocks = _get_weights(model, blocks)
    embeddings = _get_weights(model, [module for module in submodules if isinstance(module, nn.Embedding)])
    experts = _get_weights(model, [module for module in submodules if isinstance(module, Experts)])
    if not in_blocks:
        raise ModelError("optimizer.name=muon: the model has no list of repeated blocks (nn.ModuleList); use adamw")
    matrices = {}
    for name, parameter in model.trainable_parameters.items():
        shape = model.get_shard_spec(name).shape
        is_matrix = len(shape) == 2 or (len(shape) == 3 and parameter in experts)
        if is_matrix and parameter in in_blocks and parameter not in embeddings:
            matrices[name] = (shape[-2], shape[-1])
    return matrices


def connect_optimizer(
    optimizer: Optimizer, model: ParallelModel, indexes: list[StateIndex], context: ParallelContext
) -> None:
    """Plan the communication of an optimizer that needs whole matrices. Does nothing for others.

    `indexes`: the state index of every rank. Call before the first step.
    """
    if not isinstance(optimizer, Muon):
        return
    layout = context.layout
    replicas = [layout.get_state_replica(rank) for rank in range(layout.world_size)]
    exchange = MatrixExchange(_select_momenta(indexes), replicas, context.rank, context.world_group, context.device)
    momenta = optimizer.moments[MOMENT_NAMES["muon"][0]]
    slices = [ParameterSlice(model, name) for name in model.parameters if name in momenta]

    def make_shards(updates: Mapping[str, Tensor]) -> ShardedState:
        return ShardedState(
            shard for weight in slices for shard in weight.make_shards(_MOMENTUM_KIND, updates[weight.name])
        )

    optimizer.connect(exchange, make_shards)


def _select_momenta(indexes: list[StateIndex]) -> list[StateIndex]:
    """Return the part of each index that lists momentum buffers; one object for ranks that had one in common."""
    selected = {
        id(index): index.select(name for name in index if name.startswith(f"{_MOMENTUM_KIND}.")) for index in indexes
    }
    return [selected[id(index)] for index in indexes]


def _get_weights(model: ParallelModel, modules: Sequence[nn.Module]) -> set[nn.Parameter]:
    """Return the weights of the parameters of modules."""
    return {model.weight_copies.get_weight(parameter) for module in modules for parameter in module.parameters()}
