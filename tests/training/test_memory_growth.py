"""Memory over many steps: a rank keeps no tensor of earlier steps, whatever it does in a step."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.training.builder import build_trainer
from tests.training.elastic_runs import BASE, MODELS
from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

STEPS = 11
FIRST_STEP = 3  # before it, lists and buffers are filled
LAYOUTS = {
    "ddp-3": ["cluster.workers=3"],
    "ddp-2": ["cluster.workers=2"],
    "zero1-3": ["cluster.workers=3", "parallel.zero=1"],
    "zero3-2, tp2": ["cluster.workers=4", "parallel.zero=3", "parallel.tp=2"],
    "pp2 x ddp-2": ["cluster.workers=4", "parallel.pp=2"],
}
FEATURES = {
    "plain": ["train.deterministic=true"],
    "elastic": [],
    "audits": ["fault.audit_interval=1"],
    "samples": ["fault.audit_interval=100", "fault.spare_audit_interval=1", "cluster.spares=1"],
}


def count_tensors(rank: int, rendezvous: Any, spec: Any) -> list[list[tuple[int, int]]]:
    """Train, and return the number and the bytes of this trainer's tensors after each step from FIRST_STEP on."""
    gc.collect()
    gc.freeze()  # modules and what earlier tests left: hundreds of thousands of objects
    trainer, sizes = build_trainer(spec, rank, torch.device("cpu"), rendezvous, ControlChannel()), []
    train_step = trainer.train_step

    def train_and_count(step: int) -> Any:
        result = train_step(step)
        if step >= FIRST_STEP:
            gc.collect()
            tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
            sizes.append((len(tensors), sum(tensor.nbytes for tensor in tensors)))
        return result

    trainer.train_step = train_and_count  # type: ignore[method-assign]
    trainer.run(spec.start_step, spec.end_step)
    del trainer.train_step  # it refers to the trainer
    gc.unfreeze()
    return [sizes]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_do_not_become_more(pool: WarmPool, layout: str, feature: str) -> None:
    words = [*BASE, *MODELS["llama"], "eval.interval=0", "checkpoint.interval=0", *LAYOUTS[layout], *FEATURES[feature]]
    config = make_small_config(None, *words, f"train.steps={STEPS}")
    spec = make_worker_spec(config, int(config.cluster.workers), steps_to=STEPS)
    for (sizes,) in pool.call(count_tensors, spec.layout.world_size, spec):
        # From step to step they vary: batches are read ahead, and ranks take turns with samples.
        for early, late in zip(zip(*sizes[:4], strict=True), zip(*sizes[4:], strict=True), strict=True):
            assert min(late) <= max(early), sizes
