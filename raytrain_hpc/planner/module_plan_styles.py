"""Styles of a plan that shards a user's module; `parallel/module_plan.py` applies them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from raytrain_hpc.errors import ModelError

BLOCK = "block"  # a unit of sharding, activation checkpointing and compilation
ALIASES = {"sequence_parallel": "sequence", "colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise"}
IGNORED = ("replicate", BLOCK)
OWN_PLAN = "auto"  # as the only path: the plan that a transformers model has itself
STYLES = (
    "colwise",
    "colwise_gather_output",
    "rowwise",
    "rowwise_split_input",
    "packed_colwise",
    "packed_rowwise",
    "embedding_colwise",
    "embedding_rowwise",
    "sequence",
    "replicated_with_grad_allreduce",
    "moe_tp_experts",
    "all_reduce",
    *IGNORED,
)


def check_plan(plan: Mapping[str, str]) -> None:
    """Raise ModelError for a style that does not exist."""
    for path, style in plan.items():
        if path != OWN_PLAN and ALIASES.get(style, style) not in STYLES:
            raise ModelError(f"plan[{path!r}]={style!r}: known styles are {', '.join(STYLES)}")


def matches_path(name: str, pattern: str) -> bool:
    """Return whether the name of a module matches a pattern, in which `*` stands for text without a dot."""
    parts, patterns = name.split("."), pattern.split(".")
    return bool(name) and len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
