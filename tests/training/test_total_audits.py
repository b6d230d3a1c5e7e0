"""Audits of totals: what a rank contributes changes on its way into an all-reduce, and all ranks get a wrong sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import raytrain_hpc as rt
from tests.training.elastic_runs import BASE, MODELS, RunOnce, get_bits
from tests.warm_pool import RankFailedError, WarmPool, make_small_config

LLAMA = [*MODELS["llama"], "train.micro_batch_size=3"]
LAYOUTS: dict[str, list[str]] = {
    "ddp-2": [*LLAMA, "cluster.workers=2"],
    "zero2-3": [*LLAMA, "cluster.workers=3", "parallel.zero=2"],
    "ring2 x zero3-2": [*LLAMA, "cluster.workers=4", "parallel.cp=2", "parallel.zero=3"],
    "tp2 x ddp-2": [*LLAMA, "cluster.workers=4", "parallel.tp=2"],
    "pp2 x ddp-3": [*LLAMA, "cluster.workers=6", "parallel.pp=2"],
    "ep2 x ddp-2": [*MODELS["moe"], "train.micro_batch_size=2", "cluster.workers=4", "parallel.ep=2"],
}
BIASED = [*MODELS["moe"], "train.micro_batch_size=3", "model.load_balancing=bias"]
LAYOUTS |= {
    "ddp-2, biases": [*BIASED, "cluster.workers=2"],
    "pp2 x ddp-2, biases": [*BIASED, "cluster.workers=4", "parallel.pp=2"],
    "ring2 x zero3-2, biases": [*BIASED, "cluster.workers=4", "parallel.cp=2", "parallel.zero=3"],
}
# Ranks that hold one whole state, and add up its norm: with experts there is one, shared by all ranks.
NORM_RANKS = {"zero2-3": 3, "ring2 x zero3-2": 2, "tp2 x ddp-2": 2, "pp2 x ddp-3": 2, "ep2 x ddp-2": 4}
# Ranks that share the batch, and add up the loads of experts.
LOAD_RANKS = {"ddp-2, biases": 2, "pp2 x ddp-2, biases": 2, "ring2 x zero3-2, biases": 4}
CASES = [
    *((layout, "losses") for layout in LAYOUTS if layout not in LOAD_RANKS),
    *((layout, total) for layout in NORM_RANKS for total in ("squares", "largest")),
    *((layout, "loads") for layout in LOAD_RANKS),
]
SUBJECTS = {"losses": "the sums of losses and token counts", "loads": "the loads of experts"}


class WrongContribution(rt.Callback):
    """Changes what rank 1 contributes to a total: in the first all-reduce of it in step 2, or in all from there on."""

    def __init__(self, total: str, *, is_persistent: bool = False):
        self._total, self._is_persistent, self._is_done = total, is_persistent, False
        self._original: Any = None

    def pre_step(self) -> None:  # called again when the passes are repeated
        if self.context.rank == 1 and self.context.step == 1 and self._original is None:
            self._original, dist.all_reduce = dist.all_reduce, self._all_reduce

    def close(self) -> None:
        if self._original is not None:
            dist.all_reduce = self._original

    def _all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM, **kwargs: Any) -> Any:
        if self._is_of_total(tensor, op) and (self._is_persistent or not self._is_done):
            self._is_done = True
            changed = int(tensor.flatten().abs().argmax())
            tensor.view(-1)[changed] = tensor.view(-1)[changed] * 1024 + 1
        return self._original(tensor, op=op, **kwargs)

    def _is_of_total(self, tensor: Tensor, op: Any) -> bool:
        is_maximum, is_float = op == dist.ReduceOp.MAX, tensor.dtype == torch.float64
        if self._total == "loads":
            return tensor.dtype == torch.int64 and tensor.dim() == 2
        if self._total == "squares":
            return tensor.dtype == torch.int64 and tensor.shape == (2,) and not is_maximum
        return is_float and (is_maximum if self._total == "largest" else not is_maximum and tensor.dim() == 1)


@pytest.mark.parametrize(("layout", "total"), CASES)
def test_a_total_that_is_wrong_on_all_ranks_alike_is_computed_again(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, layout: str, total: str
) -> None:
    words = [*LAYOUTS[layout], "train.steps=4"]
    expected = run_once(*words)
    config = make_small_config(tmp_path, *BASE, *words, "fault.audit_interval=1")
    records = pool.train(config, callbacks=[WrongContribution(total)])[0]
    assert get_bits(records, tmp_path) == expected
    incidents = [record for record in records if record["type"] == "incident"]
    num_ranks = config.cluster.workers if total == "losses" else (NORM_RANKS | LOAD_RANKS)[layout]
    subject = SUBJECTS.get(total, "the norm of gradients")
    assert len(incidents) == num_ranks and 1 in {incident["rank"] for incident in incidents}
    for incident in incidents:
        assert incident["reason"].startswith(f"rank {incident['rank']} received {subject} wrong, or those that")
        assert incident["reason"].endswith("right when repeated")


@pytest.mark.parametrize(
    ("layout", "total"), [("zero2-3", "squares"), ("tp2 x ddp-2", "losses"), ("ddp-2, biases", "loads")]
)
def test_a_total_that_is_wrong_again_ends_the_generation(
    pool: WarmPool, tmp_path: Path, layout: str, total: str
) -> None:
    config = make_small_config(tmp_path, *BASE, *LAYOUTS[layout], "fault.audit_interval=1")
    with pytest.raises(RankFailedError, match="AuditMismatchError: audit of step 2: .*again when repeated"):
        pool.train(config, callbacks=[WrongContribution(total, is_persistent=True)])
