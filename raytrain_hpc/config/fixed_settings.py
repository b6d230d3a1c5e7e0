"""Settings that a run keeps once it has a checkpoint: those that its loss curve depends on."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any, Literal, NamedTuple

from raytrain_hpc.config.schema import AUTO, Config, to_dict

Rule = Literal["fixed", "fixed by content", "changeable"]

# The rule for each key, or for all other keys of a section. A run that is started again must have the same value of a
# fixed key. Keys that are fixed by content may be written in another way: the checkpoint knows the architecture and the
# data that they resolve to, and the driver compares those.
RULES: Mapping[str, Rule] = {
    "run.*": "changeable",
    "run.seed": "fixed",
    "run.init_from": "fixed",
    "model.*": "fixed by content",
    "data.*": "changeable",  # how samples are read
    "data.path": "fixed by content",
    "data.sources": "fixed by content",
    "data.stages": "fixed by content",  # stages that have not begun may change
    "data.order": "fixed",
    "data.packing": "fixed",
    "data.bucket_steps": "fixed",
    "train.*": "fixed",
    "train.steps": "changeable",  # but not below the steps that are trained
    "train.deterministic": "changeable",  # rounding
    "train.compile": "changeable",
    "train.weight_copies": "changeable",
    "train.callbacks": "changeable",
    "optimizer.*": "fixed",
    "lr_scheduler.*": "fixed",
    "eval.*": "changeable",
    "lora.*": "fixed",
    "parallel.*": "changeable",
    "parallel.quantize": "fixed",
    "cluster.*": "changeable",
    "checkpoint.*": "changeable",
    "fault.*": "changeable",
    "logging.*": "changeable",
    "profiler.*": "changeable",
}


class ChangedSetting(NamedTuple):
    """A fixed key with the value that a run was trained with and the one that it is started again with."""

    key: str
    old: Any
    new: Any


def get_rule(key: str) -> Rule:
    """Return the rule for a dotted key."""
    return RULES.get(key) or RULES[f"{key.partition('.')[0]}.*"]


def find_changed_setting(stored: Mapping[str, Any], config: Config) -> ChangedSetting | None:
    """Return the first fixed key whose value differs from that in `stored`, the content of a run's config.yaml.

    Keys that `stored` lacks are skipped: it may be of an earlier version. `auto` agrees with any value, since the run
    then keeps what it was started with.
    """
    current = to_dict(config)
    for section, settings in current.items():
        for name, new in settings.items():
            key = f"{section}.{name}"
            if get_rule(key) != "fixed" or name not in (stored.get(section) or {}):
                continue
            old, new = _resolve(key, stored), _resolve(key, current)
            if old != new and AUTO not in (old, new) and not _is_close(old, new):
                return ChangedSetting(key, old, new)
    return None


def _resolve(key: str, settings: Mapping[str, Any]) -> Any:
    """Return the value of a key, with the one `auto` replaced that depends on another setting."""
    section, _, name = key.partition(".")
    value, lr = settings[section][name], settings.get("optimizer", {}).get("lr")
    return 0.1 * lr if key == "lr_scheduler.min_lr" and value == AUTO and lr is not None else value


def _is_close(old: Any, new: Any) -> bool:
    return isinstance(old, float) and isinstance(new, float) and isclose(old, new, rel_tol=1e-12)
