"""Recovery from silent corruption on Ray, when ranks do not all end their generation in the same way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import raytrain_hpc as rt
from raytrain_hpc.training import pass_audits
from tests.driver.cli_process import read_curve
from tests.driver.test_ray_faults import make_config, read_incidents, train_reference
from tests.warm_pool import WarmPool

NUM_STEPS = 16


class SlowJudge(rt.Callback):
    """Rank 2 needs longer than the others to tell who is wrong in generation 1, as on a busy host."""

    def on_generation_start(self) -> None:
        self._original = pass_audits.merge_findings
        if (self.context.rank, self.context.generation) == (2, 1):
            pass_audits.merge_findings = self._merge

    def close(self) -> None:
        pass_audits.merge_findings = self._original

    def _merge(self, findings: Any) -> Any:
        time.sleep(1.0)  # the driver aborts collectives after 0.2 s
        return self._original(findings)


def test_a_rank_that_is_aborted_before_it_has_judged_brings_no_unverified_state_back(
    ray_cluster: None, pool: WarmPool, tmp_path: Path
) -> None:
    """It ends with an aborted generation, and keeps its live state. Steps since the last audit may be wrong."""
    steps = [f"train.steps={NUM_STEPS}", "checkpoint.interval=0"]
    expected = train_reference(pool, NUM_STEPS, *steps)
    fault = "fault.inject=[{kind: bitflip_gradient, rank: 1, step: 6, bit: 22, persistent: true}]"
    audited = ["fault.audit_interval=4", "fault.keep_verified_state=true", "fault.stall_timeout=30"]
    words = [*steps, *audited, fault, "cluster.workers=3", "cluster.min_workers=3"]
    result = rt.train(make_config(tmp_path, *words), callbacks=[SlowJudge()], quiet=True)
    assert (result.outcome, result.restarts) == ("done", 1)
    (incident,) = read_incidents(tmp_path)
    assert (incident["kind"], incident["rank"], incident["step"], incident["steps_lost"]) == ("faulty device", 1, 7, 3)
    assert read_curve(tmp_path, NUM_STEPS) == expected
