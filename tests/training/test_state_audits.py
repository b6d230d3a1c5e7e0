"""Audits of steps: what only the rank itself has: its state, and the sums of the gradients of its microbatches."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import Tensor

import raytrain_hpc as rt
from raytrain_hpc.parallel.pairwise_sum import PairwiseSum
from raytrain_hpc.runtime.bit_flips import flip_bit
from tests.training.elastic_runs import BASE, RunOnce, get_bits
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


class WrongAddition(rt.Callback):
    """Rank 1 adds the gradients of two of its microbatches wrong in step 2: once, or whenever it adds two."""

    def __init__(self, *, is_persistent: bool):
        self._is_persistent, self._original = is_persistent, None

    def pre_step(self) -> None:  # called again when the passes are repeated
        if (self.context.rank, self.context.step) == (1, 1) and self._original is None:
            self._original = original = PairwiseSum.add

            def add(tree: PairwiseSum, value: Tensor, node: tuple[int, int]) -> list[Tensor]:
                consumed = original(tree, value, node)
                if consumed and node[0] == 0 and value.numel() > 1 and value.is_floating_point():
                    flip_bit(list(tree.open_nodes.values())[-1], 20)
                    if not self._is_persistent:
                        PairwiseSum.add = original
                return consumed

            PairwiseSum.add = add

    def close(self) -> None:
        if self._original is not None:
            PairwiseSum.add = self._original


OWN_SUMS = ["ddp-2", "zero1-2", "ddp-5", "tp2 x ddp-2", "ep2 x ddp-2"]


@pytest.mark.parametrize("layout", OWN_SUMS)
def test_a_rank_that_adds_its_own_microbatches_wrong_once_is_named_and_the_error_is_undone(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str
) -> None:
    """All ranks get the same wrong sum from it."""
    words = [*LAYOUTS[layout], "train.micro_batch_size=1", "train.steps=3"]
    callbacks = [WrongAddition(is_persistent=False)]
    records = pool.train(make_small_config(tmp_path, *BASE, *words, AUDITED), callbacks=callbacks)[0]
    assert get_bits(records, tmp_path) == run_once(*words)
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert (incident["rank"], incident["operation"]) == (1, "audit of step 2")
    reason = r"rank 1 kept reduced gradients wrong \(partial sum of gradients? of .* first\), right when repeated"
    assert re.match(reason, incident["reason"]), incident["reason"]


def test_a_rank_that_adds_its_own_microbatches_wrong_again_ends_the_generation(pool: WarmPool) -> None:
    words = [*LAYOUTS["ddp-2"], "train.micro_batch_size=1"]
    with pytest.raises(RankFailedError, match=r"step 2: rank 1 kept reduced gradients .*partial sum.*again when rep"):
        pool.train(make_small_config(None, *BASE, *words, AUDITED), callbacks=[WrongAddition(is_persistent=True)])
