"""Audits of what passes leave besides gradients: loads of experts, and running statistics."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raytrain_hpc as rt
from examples import custom_module
from raytrain_hpc.model import moe
from raytrain_hpc.runtime.worker_spec import CustomModel
from tests.training.elastic_runs import BASE, MODELS, RunOnce, get_bits, run_bits
from tests.training.normalized_bigram import build_normalized_bigram
from tests.warm_pool import RankFailedError, WarmPool, make_small_config

AUDITED = "fault.audit_interval=1"
BIASED = [*MODELS["moe"], "model.load_balancing=bias", "train.steps=4", "train.micro_batch_size=4"]
LAYOUTS = {
    "ddp-3": ["cluster.workers=3"],
    "tp2 x zero3-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3"],
    "ring2 x ddp-2": ["cluster.workers=4", "parallel.cp=2"],
    "ep2, recompute": ["cluster.workers=2", "parallel.ep=2", "parallel.activation_checkpointing=full"],
    "zbv x ddp-2": [
        *("cluster.workers=4", "parallel.pp=2", "model.num_layers=4", "train.micro_batch_size=6"),
        "parallel.pp_schedule=zbv",
    ],
    "interleaved x ddp-2": [
        *("cluster.workers=4", "parallel.pp=2", "model.num_layers=4", "train.micro_batch_size=2"),
        "parallel.pp_schedule=interleaved_1f1b",
    ],
}


class WrongCount(rt.Callback):
    """Rank 1 counts 100 positions too many in a backward pass of step 2: in the n-th pass of it, or in all.

    The first ones of an audited step compute the microbatch of another rank again.
    """

    def __init__(self, number: int | None):
        self._number, self._original, self._num_passes = number, None, 0

    def pre_step(self) -> None:  # called again when the passes are repeated
        if self.context.rank == 1 and self.context.step == 1 and self._original is None:
            self._original = moe._BalanceLoss.backward
            moe._BalanceLoss.backward = self._run_backward

    def close(self) -> None:
        if self._original is not None:
            moe._BalanceLoss.backward = self._original

    def _run_backward(self, ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.load[0] += 100 * int(self._number in (None, self._num_passes))
        self._num_passes += 1
        return self._original(ctx, *gradients)


class WrongStatistics(rt.Callback):
    """Rank 1 computes a running mean wrong in step 2: in the n-th forward pass of it, or in all."""

    def __init__(self, number: int | None):
        self._number, self._handle, self._num_passes = number, None, 0

    def pre_step(self) -> None:
        if self.context.rank == 1 and self.context.step == 1 and self._handle is None:
            (module,) = self.context.modules.values()
            norms = [submodule for submodule in module.modules() if isinstance(submodule, nn.BatchNorm1d)]
            self._handle = norms[0].register_forward_hook(self._change)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def _change(self, norm: nn.BatchNorm1d, *_: Any) -> None:
        if self._number in (None, self._num_passes):
            norm.running_mean.data[0] += 1.0  # autograd does not notice
        self._num_passes += 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loads_of_experts_raise_no_alarm(pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str) -> None:
    words = [*BIASED, *LAYOUTS[layout]]
    records = pool.train(make_small_config(tmp_path, *BASE, *words, AUDITED))[0]
    assert get_bits(records, tmp_path) == run_once(*words)
    assert [record for record in records if record["type"] == "incident"] == []


# A rank has two layers. 0 is in the passes that compute the microbatch of another rank again.
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("layout", ["ddp-3", "tp2 x zero3-2", "zbv x ddp-2"])
def test_a_load_that_is_counted_wrong_is_named_and_undone(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str, number: int
) -> None:
    words = [*BIASED, *LAYOUTS[layout]]
    records = pool.train(make_small_config(tmp_path, *BASE, *words, AUDITED), callbacks=[WrongCount(number)])[0]
    assert get_bits(records, tmp_path) == run_once(*words)
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert (incident["rank"], incident["operation"]) == (1, "audit of step 2")
    assert re.match(r"rank 1 computed microbatch \d wrong \(load of .*router.*right when repeated", incident["reason"])


def test_a_rank_that_counts_loads_wrong_again_ends_the_generation(pool: WarmPool, tmp_path: Path) -> None:
    config = make_small_config(tmp_path, *BASE, *BIASED, *LAYOUTS["ddp-3"], AUDITED)
    with pytest.raises(RankFailedError, match=r"audit of step 2: rank 1 computed .*\(load of .*again when repeated"):
        pool.train(config, callbacks=[WrongCount(None)])


@pytest.mark.parametrize("number", [0, 1, None])
def test_running_statistics_that_are_computed_wrong_are_found(
    pool: WarmPool, tmp_path: Path, number: int | None
) -> None:
    custom = CustomModel(build_normalized_bigram, custom_module.loss)
    words = ["cluster.workers=3", "model.dropout=0", "train.micro_batch_size=4", "train.steps=4"]
    config = make_small_config(tmp_path / "audited", *BASE, *words, AUDITED)
    named = r"rank 1 computed microbatch \d wrong \(buffer norm.running_mean"
    if number is None:
        with pytest.raises(RankFailedError, match=f"audit of step 2: {named}.*again when repeated"):
            pool.train(config, custom=custom, callbacks=[WrongStatistics(None)])
        return
    records = pool.train(config, custom=custom, callbacks=[WrongStatistics(number)])[0]
    assert get_bits(records, tmp_path / "audited") == run_bits(pool, tmp_path / "plain", *words, custom=custom)
    (incident,) = [record for record in records if record["type"] == "incident"]
    assert incident["rank"] == 1 and re.match(named, incident["reason"])
