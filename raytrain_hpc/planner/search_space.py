"""Search space of the planner: the settings that it chooses, and the config with its choice applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from raytrain_hpc.config.schema import AUTO, PLANNABLE_KEYS, Config, get_default
from raytrain_hpc.planner.workload import LayoutChoice

# Key without its section -> values to choose from; None: all useful values.
SearchSpace = Mapping[str, Sequence[Any] | None]
# Keys chosen if they are not set. Schedules and offloading are chosen only on request.
_DEFAULT_SEARCH_KEYS = ("tp", "cp", "pp", "ep", "zero", "activation_checkpointing")
_MODEL_PARALLEL_AXES = ("tp", "cp", "pp", "ep")


def build_search_space(config: Config, *, has_accelerator: bool, data_parallel_only: bool = False) -> SearchSpace:
    """Return the settings that the planner chooses, without their section, and the values to choose from.

    These are keys set to `auto` or to a list and, on accelerators, parallel settings that are not set at all. A value
    that was assigned to an attribute of the config is kept, unless it is the default. On CPUs, which are for tests and
    small models, unset keys keep their defaults. Unset model-parallel axes also keep their
    defaults under `data_parallel_only` and train.deterministic=elastic.
    """
    space: dict[str, Sequence[Any] | None] = {}
    for key in PLANNABLE_KEYS:
        name = key.partition(".")[2]
        if _is_set(config, key):
            continue
        if key in config.auto_choices:
            space[name] = config.auto_choices[key]
        elif has_accelerator and name in _DEFAULT_SEARCH_KEYS:
            space[name] = None
    if has_accelerator and config.train.micro_batch_size == AUTO:
        space["micro_batch_size"] = None
    for name in _MODEL_PARALLEL_AXES:
        skip_model_parallel = data_parallel_only or config.train.deterministic == "elastic"
        if name in space and f"parallel.{name}" not in config.auto_choices and skip_model_parallel:
            del space[name]
    if "ep" in space and not config.model.num_experts:
        del space["ep"]
    # The memory of a user-supplied model is unknown: all of its layers are alike.
    chooses_policy = space.get("activation_checkpointing", ()) is None and not data_parallel_only
    if chooses_policy and not _is_set(config, "parallel.recompute_layers"):
        space["recompute_layers"] = None
    return space


def _is_set(config: Config, key: str) -> bool:
    """Return whether a key has a single value, given by a setting or assigned to the attribute of the config."""
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name)
    if key in config.auto_choices:
        first, *_ = config.auto_choices[key] or [get_default(key)]
        return bool(value != first)
    return bool(config.origin(key)) or value != get_default(key)


def apply_choice(config: Config, choice: LayoutChoice) -> Config:
    """Return a copy of the config with all chosen values filled in and nothing left to choose."""
    layout, chosen = choice.layout, copy(config)
    is_shard_chosen = "parallel.dp_shard" in config.auto_choices or (layout.dp_replicate > 1 and layout.zero > 0)
    chosen.parallel = replace(
        config.parallel,
        dp_replicate=layout.dp_replicate if config.parallel.dp_replicate != AUTO else AUTO,
        dp_shard=layout.dp_shard if is_shard_chosen else config.parallel.dp_shard,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        zero=layout.zero,
        pp_schedule=layout.schedule,
        activation_checkpointing=choice.recompute,
        recompute_layers=choice.recompute_layers,
        activation_offload=choice.activation_offload,
        offload=choice.offload,
    )
    chosen.train = replace(config.train, micro_batch_size=choice.batching.size, compile=choice.compiled)
    chosen.auto_choices = {}
    return chosen
