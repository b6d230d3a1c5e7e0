"""Audits of steps: state that changes in memory, at any time in a step."""

from __future__ import annotations

from pathlib import Path

import pytest

import raytrain_hpc as rt
from raytrain_hpc.runtime.bit_flips import flip_bit
from tests.training.elastic_runs import BASE
from tests.training.test_step_audits import ALL_BITS, AUDITED, LAYOUTS
from tests.warm_pool import RankFailedError, WarmPool, make_small_config

CHANGED = {
    "bitflip_weight": r"\(model\..* first\) has changed since step 2",
    "bitflip_moment": r"\(optimizer\..* first\) has changed since step 2",
    "bitflip": r"\(weight of .* first\) has changed since its update was computed",
}


@pytest.mark.parametrize("bit", ALL_BITS)
@pytest.mark.parametrize("kind", CHANGED)
@pytest.mark.parametrize("layout", ["ddp-2", "zero3-4, recompute", "hsdp-2x2", "zbv x zero3-2", "ep2 x zero3-2"])
def test_state_that_changes_in_memory_is_found(
    pool: WarmPool, tmp_path: Path, layout: str, kind: str, bit: int
) -> None:
    """Before or after an update; also a shard that no other rank has."""
    fault = f"fault.inject=[{{kind: {kind}, rank: 1, step: 3, bit: {bit}}}]"
    named = f"StateChangedError: audit of step 3: the state of rank 1 {CHANGED[kind]}"
    with pytest.raises(RankFailedError, match=named):
        pool.train(make_small_config(tmp_path, *BASE, *LAYOUTS[layout], AUDITED, fault))


class FlipInStep(rt.Callback):
    """A bit flip in the memory of rank 1, in a weight, while step 3 is computed. `hook`: in which it happens."""

    def __init__(self, hook: str):
        self._hook = hook

    def post_forward_backward(self) -> None:
        self._flip("post_forward_backward")

    def pre_optim_step(self) -> None:
        self._flip("pre_optim_step")

    def _flip(self, hook: str) -> None:
        if self.context.rank == 1 and self.context.step == 2 and hook == self._hook:
            flip_bit(next(weight for weight in self.context.parameters.values() if weight.numel()), 0)


class ChangeWeights(rt.Callback):
    """A change of weights at a time when nothing may change them."""

    def pre_step(self) -> None:
        for weight in self.context.parameters.values():
            weight.mul_(0.5)


@pytest.mark.parametrize(
    ("callback", "error"),
    [
        (
            FlipInStep("post_forward_backward"),
            r"StateChangedError: audit of step 3: the state of rank 1 \(model\..*step 2",
        ),
        (FlipInStep("pre_optim_step"), r"StateChangedError: audit of step 3: the state of rank 1 \(model\..*step 2"),
        (
            ChangeWeights(),
            "CallbackError: callbacks: in an audited step, model.* has changed on all ranks; change state",
        ),
    ],
    ids=["flip before the norm", "flip after it", "callback"],
)
@pytest.mark.parametrize("layout", ["zero2-3", "ddp-2"])
def test_state_that_changes_during_a_step_is_found(
    pool: WarmPool, layout: str, callback: rt.Callback, error: str
) -> None:
    config = make_small_config(None, *BASE, *LAYOUTS[layout], AUDITED)
    with pytest.raises(RankFailedError, match=error):
        pool.train(config, callbacks=(callback,))


@pytest.mark.parametrize("kind", ["weight", "moment"])
@pytest.mark.parametrize("layout", ["ddp-2", "zero3-4, recompute"])
def test_state_that_changes_before_the_first_step_is_found(pool: WarmPool, layout: str, kind: str) -> None:
    """No step has recorded it. Under ZeRO, no other rank has the same."""
    fault = f"fault.inject=[{{kind: bitflip_{kind}, rank: 1, step: 1, bit: 11}}]"
    with pytest.raises(RankFailedError, match="StateChangedError: audit of step 1: the state of rank 1"):
        pool.train(make_small_config(None, *BASE, *LAYOUTS[layout], AUDITED, fault))
