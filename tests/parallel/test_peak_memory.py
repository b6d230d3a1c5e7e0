"""The most bytes alive on a rank within a step, counted, against what the planner expects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.planner.memory_model import MemoryModel
from raytrain_hpc.planner.workload import LayoutChoice, make_workload
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.builder import build_trainer
from tests.parallel.layout_run import GPT2, LLAMA
from tests.parallel.test_state_memory import Made
from tests.warm_pool import WarmPool, make_small_config

SIZES = ["model.hidden_size=64", "model.num_layers=4", "model.vocab_size=128", "train.seq_len=64"]
BATCH = ["train.global_batch=16", "train.micro_batch=2"]
FAMILIES = {"gpt2": [*GPT2, "model.dropout=0.1"], "llama": [*LLAMA, "model.num_kv_heads=2"]}
LAYOUTS = {
    "alone": ["cluster.workers=1"],
    "alone, long": ["cluster.workers=1", "train.micro_batch=8"],
    "alone, one microbatch": ["cluster.workers=1", "train.micro_batch=16"],
    "alone, selective": ["cluster.workers=1", "parallel.recompute=selective"],
    "alone, full": ["cluster.workers=1", "parallel.recompute=full"],
    "dp-2": ["cluster.workers=2"],
    "dp-2, one microbatch each": ["cluster.workers=2", "train.micro_batch=8"],
    "zero3-2, one microbatch each": ["cluster.workers=2", "train.micro_batch=8", "parallel.zero=3"],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero2-2": ["cluster.workers=2", "parallel.zero=2"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "tp-2": ["cluster.workers=2", "parallel.tp=2"],
    "cp-2": ["cluster.workers=2", "parallel.cp=2"],
    "pp-2": ["cluster.workers=2", "parallel.pp=2"],
    "pp-2, gpipe": ["cluster.workers=2", "parallel.pp=2", "parallel.schedule=gpipe"],
    "pp-2 x tp-2": ["cluster.workers=4", "parallel.pp=2", "parallel.tp=2"],
    "zero3-2 x tp-2": ["cluster.workers=4", "parallel.zero=3", "parallel.tp=2"],
}


class Peak(Made):
    """The most that was alive at once: counted where what was made since the last count could have raised it, and every
    so often, since FSDP2 gives storages another size without a word."""

    most = 0
    _bound, _since = 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(function, types, args, kwargs)
        new = [one for one in tree_leaves(made) if isinstance(one, torch.Tensor) and one.device.type != "meta"]
        self._bound += sum(one.untyped_storage().nbytes() for one in new if type(one) is torch.Tensor)
        self._since += 1
        if self._bound > self.most or self._since == 16:
            self._bound, self._since = self.bytes(), 0
            self.most = max(self.most, self._bound)
        return made


def peak_of_rank(rank: int, meeting: Any, spec: Any) -> int:
    """In the second step: the first one makes the optimizer's moments."""
    with Peak() as peak:
        trainer = build_trainer(spec, rank, torch.device("cpu"), meeting, ControlChannel())
        trainer.train_step(0)
        peak.most = 0
        trainer.train_step(1)
    return peak.most


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_peak_is_as_high_as_planned(pool: WarmPool, layout: str, family: str) -> None:
    config = make_small_config(None, *SIZES, *BATCH, *FAMILIES[family], *LAYOUTS[layout])
    prepared = prepare_run(config, None, print)
    resolved, batching = prepared.resolve_layout(int(config.cluster.workers))
    choice = LayoutChoice(resolved, batching, config.parallel.recompute)
    planned = MemoryModel(make_workload(config, prepared.model_spec)).estimate_footprint(choice)
    measured = max(pool.inspect_trainers(peak_of_rank, config, build=False))
    assert measured == pytest.approx(planned.allocated, rel=0.05)
