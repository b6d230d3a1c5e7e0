"""A fault at the end of a step or of an evaluation: requests of callbacks are carried out, and effects count once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from raytrain_hpc.callbacks.callback import Callback
from tests.callbacks.recording_callbacks import EvaluationEffects, PeerFailure, Requester, get_notes
from tests.training.generations import run_generation, run_until_fault
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config, make_worker_spec

BASE = ["train.steps=5", "train.micro_batch_size=2", "train.deterministic=elastic"]
SURVIVORS = {"same ranks": (0, 1), "other ranks": (1, 0)}  # rank in the second generation of ranks 0 and 1


def recover(
    pool: WarmPool,
    callbacks: Sequence[Callback],
    ranks: Sequence[int],
    *words: str,
    fails_after_agreement: Sequence[int] = (),
    **changes: Any,
) -> list[list[dict[str, Any]]]:
    """Train on three ranks until one fails after step 3, then on two of them from memory; return their records."""
    config = make_small_config(None, *BASE, *words, "cluster.workers=3")
    first = replace(make_worker_spec(config, 3, steps_to=5), callbacks=tuple(callbacks))
    steps = pool.call(run_until_fault, 3, first, tuple(fails_after_agreement))
    assert [of_rank[-1] for of_rank in steps[:2]] == [3, 3]
    config = make_small_config(None, *BASE, *words, "cluster.workers=2")
    second = make_worker_spec(config, 2, steps_to=5)
    second = replace(second, callbacks=tuple(callbacks), memory_step=3, generation=2)
    results = pool.call(run_generation, 2, [replace(second, **changes)], ranks, ())
    return [records for _, _, _, records in sorted(results, key=lambda result: result[0])]


@pytest.fixture(scope="module")
def undisturbed(pool: WarmPool) -> list[dict[str, Any]]:
    """Return the records of rank 0 of a run that evaluates after step 3."""
    config = make_small_config(None, *BASE, "cluster.workers=2", "eval.interval=3")
    return pool.train(config, callbacks=[EvaluationEffects()])[0]


@pytest.mark.parametrize("ranks", SURVIVORS.values(), ids=SURVIVORS)
def test_requests_that_ranks_had_not_agreed_on_are_carried_out(pool: WarmPool, ranks: tuple[int, int]) -> None:
    requesters = [Requester(rank, {"post_step": {3: [("save", (f"of-{rank}",))]}}) for rank in (0, 1, 2)]
    for records in recover(pool, [*requesters, PeerFailure("post_step", 3, rank=2, priority=-1)], ranks):
        assert get_notes(records)[:3] == ["saved 3"] * 3, "once, as each of the three callbacks sees"
        assert [step for step in get_step_metrics(records) if step["step"] <= 3] == []
        labels = [(record["step"], record["labels"]) for record in records if record["type"] == "label"]
        assert labels in ([], [(3, ["of-0", "of-1"])]), "rank 0 reports them"


@pytest.mark.parametrize("ranks", SURVIVORS.values(), ids=SURVIVORS)
def test_a_rank_that_had_agreed_knows_requests_of_a_lost_rank(pool: WarmPool, ranks: tuple[int, int]) -> None:
    requester = Requester(2, {"post_step": {3: [("save", ("lost",))]}})
    for records in recover(pool, [requester], ranks, fails_after_agreement=(1, 2)):
        assert get_notes(records)[0] == "saved 3"


@pytest.mark.parametrize("ranks", SURVIVORS.values(), ids=SURVIVORS)
@pytest.mark.parametrize("effects_of", [(), (1,), (0, 1)], ids=["no rank", "one rank", "both ranks"])
def test_effects_of_an_evaluation_count_once(
    pool: WarmPool, undisturbed: list[dict[str, Any]], ranks: tuple[int, int], effects_of: tuple[int, ...]
) -> None:
    """`effects_of`: survivors whose callbacks have seen the evaluation when another rank fails, before they agree."""
    failures = [PeerFailure("post_eval", 3, rank, priority=1) for rank in {0, 1, 2} - {*effects_of}]
    expected = get_step_metrics(undisturbed)
    lost = {key: value for key, value in expected[2].items() if not key.startswith("val/")}  # as the driver knows it
    callbacks = [EvaluationEffects(), *failures]
    records = recover(pool, callbacks, ranks, "eval.interval=3", pending_eval_metrics=lost)[0]
    for step, of_undisturbed in zip(get_step_metrics(records), expected[2:], strict=True):
        for key in ("step", "train/loss", "train/grad_norm", "val/loss", "val/count"):
            assert step.get(key) == of_undisturbed.get(key), (step["step"], key)
    assert get_notes(records)[-1] == get_notes(undisturbed)[-1] == "end: 2 2 [2.0]"
