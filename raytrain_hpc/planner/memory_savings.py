"""Choice of the measures that save memory: the cheapest ones with which a layout fits into the device.

Pure functions: whether a choice fits and how long its step takes is asked of the caller's models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from raytrain_hpc.config.schema import Config
from raytrain_hpc.planner.activation_memory import Recompute
from raytrain_hpc.planner.search_space import SearchSpace
from raytrain_hpc.planner.workload import ActivationOffload, LayoutChoice, Offload

_RECOMPUTE_ORDER: tuple[Recompute, ...] = ("none", "selective", "full")
_OFFLOAD_ORDER: tuple[Offload, ...] = ("none", "cpu", "disk")
_ONLY_ON_REQUEST = "disk"
_ACTIVATION_OFFLOAD_ORDER: tuple[ActivationOffload, ...] = ("none", "cpu")


@dataclass(frozen=True)
class SavingOptions:
    """Allowed measures, those that save least first.

    `recompute_layers`: numbers of layers of a stage to recompute, 0: all; None: any number.
    """

    recompute: Sequence[Recompute]
    recompute_layers: Sequence[int] | None
    activation_offload: Sequence[ActivationOffload]
    offload: Sequence[Offload]

    def apply_strongest(self, choice: LayoutChoice) -> LayoutChoice:
        """Return the choice with the measures that save most memory."""
        return self._apply_layers(
            replace(
                choice,
                recompute=self.recompute[-1],
                activation_offload=self.activation_offload[-1],
                offload=self.offload[-1],
            ),
            0 if self.recompute_layers is None else self.recompute_layers[-1],
        )

    def find_cheapest(
        self,
        choice: LayoutChoice,
        max_stage_layers: int,
        fits: Callable[[LayoutChoice], bool],
        estimate_step_s: Callable[[LayoutChoice], float],
    ) -> LayoutChoice:
        """Return the choice with the cheapest measures with which it fits, or with the strongest if none suffices.

        Offloading is only considered where recomputation does not suffice; of optimizer state last. Of each policy, as
        few layers are recomputed as fit (with offloaded activations also as many as allowed), and of these candidates
        the one with the shortest step is returned.
        `max_stage_layers`: layers of the largest pipeline stage. `fits` must hold for more recomputed layers if it
        holds for fewer.
        """
        for offload, activation_offload in product(self.offload, self.activation_offload):
            placed = replace(choice, offload=offload, activation_offload=activation_offload)
            candidates = [*self._iter_fewest_layers(placed, max_stage_layers, fits)]
            if candidates:
                return min(candidates, key=estimate_step_s) if len(candidates) > 1 else candidates[0]
        return self.apply_strongest(choice)

    def _iter_fewest_layers(
        self, choice: LayoutChoice, max_stage_layers: int, fits: Callable[[LayoutChoice], bool]
    ) -> Iterator[LayoutChoice]:
        """Yield, for each policy with which a choice fits, the choice with the fewest recomputed layers."""
        for policy in self.recompute:
            candidate = replace(choice, recompute=policy)
            if policy == "none":
                counts: Sequence[int] = [0]
            elif self.recompute_layers is None:
                counts = [*range(1, max_stage_layers), 0]
            else:
                counts = self.recompute_layers
            if not fits(self._apply_layers(candidate, counts[-1])):
                continue
            first, last = 0, len(counts) - 1  # bisect: `counts` are in the order of the memory that they save
            while first < last:
                middle = (first + last) // 2
                if fits(self._apply_layers(candidate, counts[middle])):
                    last = middle
                else:
                    first = middle + 1
            yield self._apply_layers(candidate, counts[last])
            if choice.activation_offload != "none":  # recomputed layers move less
                yield self._apply_layers(candidate, counts[-1])
            elif policy == "none":
                return

    @staticmethod
    def _apply_layers(choice: LayoutChoice, count: int) -> LayoutChoice:
        return replace(choice, recompute_layers=0 if choice.recompute == "none" else count)


def list_saving_options(config: Config, space: SearchSpace) -> SavingOptions:
    """Return the measures that the settings and the search space allow."""

    def list_options(key: str, order: Sequence[Any]) -> Sequence[Any]:
        if key not in space:
            return [getattr(config.parallel, key)]
        allowed = space[key]
        if allowed is None:
            return [option for option in order if option != _ONLY_ON_REQUEST]
        return [option for option in order if option in allowed]

    layers: Sequence[int] | None = [config.parallel.recompute_layers]
    if "recompute_layers" in space:
        numbers = space["recompute_layers"]
        layers = None if numbers is None else sorted(numbers, key=lambda number: (number == 0, number))
    return SavingOptions(
        list_options("activation_checkpointing", _RECOMPUTE_ORDER),
        layers,
        list_options("activation_offload", _ACTIVATION_OFFLOAD_ORDER),
        list_options("offload", _OFFLOAD_ORDER),
    )
