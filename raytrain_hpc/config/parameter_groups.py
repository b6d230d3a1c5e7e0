"""Parameter groups: which entry of optimizer.groups applies to a parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from raytrain_hpc.config.schema import Config
from raytrain_hpc.config.training_config import ParameterGroupConfig
from raytrain_hpc.errors import ConfigError


def find_group(groups: Sequence[ParameterGroupConfig], name: str) -> ParameterGroupConfig | None:
    """Return the first group whose pattern matches a canonical parameter name, or None."""
    return next((group for group in groups if fnmatchcase(name, group.pattern)), None)


def is_frozen(groups: Sequence[ParameterGroupConfig], name: str) -> bool:
    """Return whether the group of a parameter freezes it."""
    group = find_group(groups, name)
    return group is not None and group.frozen


def check_patterns(config: Config, names: Collection[str]) -> None:
    """Raise ConfigError if a pattern matches none of the model's parameters, or if all of them are frozen."""
    key, groups = "optimizer.groups", config.optimizer.groups
    for group in groups:
        if not any(fnmatchcase(name, group.pattern) for name in names):
            examples = ", ".join(sorted(names)[:3])
            remedy = f"matches no parameter; their names are like {examples}"
            raise ConfigError(f"{key}.pattern", group.pattern, config.origin(key), remedy)
    if groups and all(is_frozen(groups, name) for name in names):
        patterns = [group.pattern for group in groups]
        raise ConfigError(key, patterns, config.origin(key), "freezes every parameter; leave some to train")
