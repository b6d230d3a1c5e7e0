"""Remedies for a run that does not fit into memory. Each is verified: with it, a legal layout fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import AUTO, Config
from raytrain_hpc.config.validation import validate_config
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.planner.hardware import DEVICES, Machine
from raytrain_hpc.planner.memory_model import MemoryModel
from raytrain_hpc.planner.search import find_lowest_memory
from raytrain_hpc.planner.search_space import SearchSpace
from raytrain_hpc.planner.workload import Workload

# Settings that save memory, the cheapest first, and their effect.
_SAVINGS: Mapping[str, tuple[Any, str]] = {
    "parallel.activation_checkpointing": ("full", "keeps only the input of each layer"),
    "train.micro_batch_size": (1, "shrinks activations"),
    "parallel.activation_offload": ("cpu", "keeps activations in host memory"),
    "parallel.dp_shard": (AUTO, "shards over all data-parallel ranks"),
    "parallel.zero": (3, "shards weights, gradients and moments"),
    "parallel.tp": (AUTO, "splits layers if that helps"),
    "parallel.pp": (AUTO, "splits the model by layers if that helps"),
    "parallel.offload": ("cpu", "keeps the optimizer's moments in host memory"),
}
_MAX_REMEDIES = 3
_NODE_FACTORS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MAX_TRIED = 6  # each is a search over the layouts of a larger machine
_MIN_SEQ_LEN = 256

_Fit = TypeVar("_Fit")


def suggest_remedies(
    config: Config, spec: ModelSpec, machine: Machine, space: SearchSpace, *, is_machine_fixed: bool = False
) -> list[str]:
    """Return up to three changes that each make a legal layout fit: of settings, devices or sequence length.

    Call if no layout fits. Arguments as of `rank_layouts`. `is_machine_fixed`: suggest no other devices. If no change
    helps, the only line says so.
    """
    search = _RemedySearch(config, spec, machine, space, cache(MemoryModel))
    remedies = list(search.iter_settings())
    if not is_machine_fixed:
        remedies += search.iter_machines()
    if len(remedies) < _MAX_REMEDIES:
        remedies += search.iter_contexts()
    return remedies[:_MAX_REMEDIES] or [
        "none found among settings that save memory, more devices and shorter sequences; use a smaller model"
    ]


@dataclass(frozen=True)
class _RemedySearch:
    """Search for changes of the settings or the machine with which a layout fits."""

    config: Config
    spec: ModelSpec
    machine: Machine
    space: SearchSpace
    get_memory_model: Callable[[Workload], MemoryModel]

    def iter_settings(self) -> Iterator[str]:
        """Yield each saving that suffices alone; if none does, a combination that does."""
        found = False
        for key, value in self._list_savings().items():
            if (gib := self._find_fit({key: value}, self.machine)) is not None:
                found = True
                yield f"{key}={value} ({_SAVINGS[key][1]}): {self._describe(gib)}"
        if not found and (combination := self._combine_savings(self.machine)) is not None:
            settings, gib = combination
            yield f"{_join(settings)}: {self._describe(gib)}"

    def iter_machines(self) -> Iterator[str]:
        """Yield more devices with which a layout fits: the fewest found without other changes, the fewest with savings.

        Then yield the smallest larger type of device.
        """
        device = self.machine.device
        plain = self._find_larger({}, lambda machine: self._find_fit({}, machine))
        saving = self._find_larger(self._list_savings(), self._combine_savings)
        if plain is not None:
            machine, gib = plain
            yield f"{self._describe_machine(machine)}: {self._describe(gib)}"
        if saving is not None and (plain is None or saving[0].nodes < plain[0].nodes):
            machine, (settings, gib) = saving
            yield f"{_join(settings)} and {self._describe_machine(machine)}: {self._describe(gib)}"
        if device.name in DEVICES and device.name != "cpu":
            for larger in sorted(DEVICES.values(), key=lambda preset: preset.memory_gib):
                machine = replace(self.machine, device=larger)
                if larger.memory_gib > device.memory_gib and (device_gib := self._find_fit({}, machine)) is not None:
                    yield f"--device {larger.name}: {device_gib:.1f} of {larger.memory_gib:g} GiB"
                    break

    def iter_contexts(self) -> Iterator[str]:
        """Yield the longest halved sequence length with which a layout fits."""
        length = self.config.train.seq_len // 2
        while length >= _MIN_SEQ_LEN:
            if (gib := self._find_fit({"train.seq_len": length}, self.machine)) is not None:
                yield f"train.seq_len={length} (a shorter context): {self._describe(gib)}"
                break
            length //= 2

    def _list_savings(self) -> dict[str, Any]:
        """Return the savings that are not in effect and that the layout search has not tried already."""
        return {
            key: value
            for key, (value, _) in _SAVINGS.items()
            if self.space.get(key.partition(".")[2], ()) is not None and _get_value(self.config, key) != value
        }

    def _find_larger(
        self, settings: Mapping[str, Any], find_fit: Callable[[Machine], _Fit | None]
    ) -> tuple[Machine, _Fit] | None:
        """Return the first of a few larger machines on which `find_fit` finds a fit, and that fit, or None.

        They start well below the size at which the state, with these settings, would suffice if it were all sharded.
        """
        lowest = self._find_lowest(settings, self.machine) or 0.0
        min_factor = 0.6 * lowest / self.machine.device.memory_gib
        for factor in [factor for factor in _NODE_FACTORS if factor >= min_factor][:_MAX_TRIED]:
            machine = replace(self.machine, nodes=self.machine.nodes * factor)
            if (fit := find_fit(machine)) is not None:
                return machine, fit
        return None

    def _combine_savings(self, machine: Machine) -> tuple[dict[str, Any], float] | None:
        """Return savings with which a layout fits on `machine`, none of which can be left out; None if all are too few.

        The most expensive ones are left out first.
        """
        settings = self._list_savings()
        gib = self._find_fit(settings, machine)
        if gib is None:
            return None
        for key in reversed(list(settings)):
            fewer = {name: value for name, value in settings.items() if name != key}
            if (candidate := self._find_fit(fewer, machine)) is not None:
                settings, gib = fewer, candidate
        return settings, gib

    def _find_fit(self, settings: Mapping[str, Any], machine: Machine) -> float | None:
        """Return the GiB of a legal layout that fits with these settings changed, or None."""
        lowest = self._find_lowest(settings, machine)
        return lowest if lowest is not None and lowest <= machine.device.memory_gib else None

    def _find_lowest(self, settings: Mapping[str, Any], machine: Machine) -> float | None:
        """Return the lowest GiB of a legal layout with these settings changed, or None if none is legal."""
        config, space = copy(self.config), dict(self.space)
        for key, value in settings.items():
            section, _, name = key.partition(".")
            space.pop(name, None)
            if value == AUTO and name != "dp_shard":  # the search fits dp_shard to the devices by itself
                space[name] = None
                continue
            setattr(config, section, replace(getattr(config, section), **{name: value}))
        try:
            validate_config(config)
            return find_lowest_memory(config, self.spec, machine, space, self.get_memory_model)
        except ConfigError:
            return None

    def _describe_machine(self, machine: Machine) -> str:
        nodes = f"{machine.nodes} nodes of {machine.per_node}"
        return f"{machine.num_devices} workers ({nodes}) instead of {self.machine.num_devices}"

    def _describe(self, gib: float) -> str:
        return f"{gib:.1f} of {self.machine.device.memory_gib:g} GiB"


def _get_value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _join(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items())
