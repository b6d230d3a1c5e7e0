"""The interval of `fault.audit_interval=auto` follows from what audits cost the slowest rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

import raytrain_hpc as rt
from raytrain_hpc.elastic.audit_cost import AuditCost
from raytrain_hpc.training import audit_callbacks, step_audits
from tests.training.elastic_runs import BASE
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

FIRST_INTERVAL, STEPS = 4, 38
WORDS = ["train.micro_batch_size=1", "train.global_batch_size=16", f"train.steps={STEPS}", "eval.interval=0"]
MODEL = ["model.num_layers=2", "model.hidden_size=16", "model.num_heads=2", "train.seq_len=7"]


class SimulatedCost(AuditCost):
    """Cost of audits of 0.059 steps on the first rank, and 0.059 more on each next one."""

    def __init__(self, rank: int):
        super().__init__()
        self._rank = rank

    def add_step(self, seconds: float, *, is_audited: bool) -> float | None:
        return super().add_step(1.0 + 0.059 * (self._rank + 1) * is_audited, is_audited=is_audited)


class SimulateCosts(rt.Callback):
    """Use simulated costs, and a short interval until costs are known."""

    def on_generation_start(self) -> None:
        self._patches = [
            patch.object(audit_callbacks, "AuditCost", partial(SimulatedCost, self.context.rank)),
            patch.object(step_audits, "choose_interval", lambda *_: FIRST_INTERVAL),
        ]
        for patched in self._patches:
            patched.start()

    def close(self) -> None:
        for patched in self._patches:
            patched.stop()


@pytest.mark.parametrize(
    ("words", "cost", "interval", "audited"),
    [
        (["cluster.workers=2"], 0.12, 12, [4, 8, 12, 24, 36]),
        (["cluster.workers=4", "parallel.pp=2", "parallel.zero=1"], 0.24, 24, [4, 8, 12, 36]),
    ],
    ids=["ddp-2", "pp2 x zero1-2"],
)
def test_ranks_agree_on_an_interval_that_costs_a_percent(
    pool: WarmPool, tmp_path: Path, words: list[str], cost: float, interval: int, audited: list[int]
) -> None:
    words = [*BASE, *WORDS, *MODEL, *words]
    config = make_small_config(tmp_path, *words, "fault.audit_interval=auto")
    records = pool.train(config, callbacks=[SimulateCosts()])[0]
    steps = get_step_metrics(records)
    assert [step["step"] for step in steps if "elastic/audited" in step] == audited
    notes = [record["text"] for record in records if record.get("type") == "note"]
    assert [note for note in notes if "every" in note] == [f"audits  every {interval} steps: one costs {cost} steps"]
