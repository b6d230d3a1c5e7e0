"""Warm-up step of a worker before it joins a generation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc.checkpoint.local_directory import LocalDirectory
from raytrain_hpc.runtime.worker_spec import LocalCheckpoint
from raytrain_hpc.training.warmup import run_warmup_step
from tests.parallel.layout_run import GPT2, LLAMA
from tests.warm_pool import WarmPool, make_small_config, make_worker_spec

SETTINGS = {
    "gpt2, dropout, elastic": [*GPT2, "model.dropout=0.1", "train.deterministic=elastic"],
    "llama, grouped heads, ZeRO-3": [*LLAMA, "model.num_kv_heads=2", "parallel.zero=3", "cluster.workers=2"],
    "experts, documents": ["model.num_experts=8", "model.experts_per_token=3", "data.packing=documents"],
    "tensor and pipeline ranks": ["parallel.tp=2", "parallel.pp=2", "cluster.workers=4"],
    "faults, a profile, recent losses": [
        "fault.inject=[{kind: exception, rank: 0, step: 1}]",
        "profiler.name=torch",
        "profiler.steps=[0, 1]",
        "fault.loss_spike_deviations=6",
    ],
    "a long sequence, a large vocabulary": ["train.seq_len=4096", "model.vocab_size=100000"],
}


def warm_up_twice(rank: int, rendezvous: Any, spec: Any) -> list[str]:
    """Warm up twice, which must equal once. Return the files in the run directory."""
    run_warmup_step(spec, torch.device("cpu"))
    run_warmup_step(spec, torch.device("cpu"))
    assert not torch.distributed.is_initialized()
    return sorted(path.name for path in Path(spec.config.run.dir).rglob("*"))


@pytest.mark.parametrize("name", SETTINGS)
def test_every_kind_of_model_warms_up_alone_and_leaves_no_files(pool: WarmPool, tmp_path: Path, name: str) -> None:
    config = make_small_config(tmp_path / "run", *SETTINGS[name])
    spec = make_worker_spec(config, int(config.cluster.workers), steps_to=5)
    assert pool.call(warm_up_twice, 1, spec) == [[]]


def test_a_replacement_leaves_the_checkpoints_of_its_node_alone(pool: WarmPool, tmp_path: Path) -> None:
    """It warms up with the generation that has failed, which may have started from a local checkpoint or afresh."""
    config = make_small_config(tmp_path / "run", "checkpoint.local_dir=" + str(tmp_path / "nvme"))
    directory = LocalDirectory.open(config)
    directory.create(4, 1)
    spec = make_worker_spec(config, 1, steps_to=5)
    for local_checkpoint in (None, LocalCheckpoint("step-00000004-g1", (("rank-00000.safetensors",),))):
        spec = replace(spec, local_checkpoint=local_checkpoint)
        assert pool.call(warm_up_twice, 1, spec) == [[]] and directory.list_names() == ["step-00000004-g1"]
