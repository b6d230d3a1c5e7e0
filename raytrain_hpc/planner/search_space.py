"""Which settings are the planner's to choose, and the settings once it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

from raytrain_hpc.config.schema import AUTO, PLANNABLE_KEYS, Config
from raytrain_hpc.planner.workload import LayoutChoice

# Key, without its section -> values to choose from; None: all that are of use.
SearchSpace = Mapping[str, Sequence[Any] | None]
# What is chosen where nobody has said anything; other schedules and offloading are asked for.
_DEFAULT_SEARCH_KEYS = ("tp", "cp", "pp", "ep", "zero", "recompute")
_MODEL_PARALLEL_AXES = ("tp", "cp", "pp", "ep")


def build_search_space(config: Config, *, has_accelerator: bool, data_parallel_only: bool = False) -> SearchSpace:
    """What is to be chosen: keys that were set to `auto` or to a list, and on accelerators what was not set at all.

    On CPUs, which are for tests and small models, what was not set keeps its default. So does what would change bits
    under train.deterministic=elastic, and what cuts a model where it has to stay whole.
    """
    free: dict[str, Sequence[Any] | None] = {}
    for key in PLANNABLE_KEYS:
        name = key.partition(".")[2]
        if key in config.auto_choices:
            free[name] = config.auto_choices[key]
        elif has_accelerator and name in _DEFAULT_SEARCH_KEYS and not config.origin(key):
            free[name] = None
    if has_accelerator and config.train.micro_batch == AUTO:
        free["micro_batch"] = None
    for name in _MODEL_PARALLEL_AXES:
        apart = data_parallel_only or config.train.deterministic == "elastic" or config.train.compile
        if name in free and f"parallel.{name}" not in config.auto_choices and apart:
            del free[name]
    if "ep" in free and not config.model.num_experts:
        del free["ep"]
    return free


def apply_choice(config: Config, choice: LayoutChoice) -> Config:
    """The settings with all that was chosen, and nothing left to choose."""
    layout, other = choice.layout, copy(config)
    other.parallel = replace(
        config.parallel,
        dp_replicate=layout.dp_replicate if config.parallel.dp_replicate != AUTO else AUTO,
        dp_shard=layout.dp_shard if layout.dp_replicate > 1 and layout.zero else config.parallel.dp_shard,
        tp=layout.tp,
        cp=layout.cp,
        pp=layout.pp,
        ep=layout.ep,
        zero=layout.zero,
        schedule=layout.schedule,
        recompute=choice.recompute,
        offload=choice.offload,
    )
    other.train = replace(config.train, micro_batch=choice.batching.size)
    other.__dict__["_auto_choices"] = {}
    return other
