"""Warm-up step of a tiny model, which loads everything that the first step of the real model needs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import ParallelConfig
from raytrain_hpc.planner.layout import Batching, Layout
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.training.builder import build_trainer

_MAX_SEQ_LEN = 128  # keeps the logits of a large vocabulary small


def run_warmup_step(spec: WorkerSpec, device: torch.device) -> None:
    """Train a tiny decoder of the run's kind for one step on the run's data, in this process alone, and discard it.

    The first step of a process takes half a second, during which the other ranks would wait for it. Custom models
    are not warmed up, since building one can be expensive.
    """
    if spec.custom is not None:
        return
    tiny = replace(
        spec,
        config=deepcopy(spec.config),
        layout=Layout(),
        batching=Batching(1, 1),
        model_spec=_shrink_model(spec.model_spec),
        resume_step=None,
        local_checkpoint=None,
        memory_step=None,
        init_checkpoint=None,
        end_step=1,
        callbacks=(),
        start_metrics=None,
        pending_eval_metrics=None,
        has_pending_checkpoint=False,
        replication_pairs=(),
    )
    tiny.config.parallel = ParallelConfig()
    train = tiny.config.train
    train.global_batch_size, train.seq_len, train.compile = 1, min(train.seq_len, _MAX_SEQ_LEN), False
    tiny.config.optimizer.groups = []  # of parameters that the tiny model may lack
    tiny.config.fault.inject = []
    tiny.config.checkpoint.local_dir = ""
    tiny.config.profiler.name = "none"
    trainer = build_trainer(tiny, 0, device, None, ControlChannel())
    trainer.train_step(0)


def _shrink_model(model_spec: ModelSpec) -> ModelSpec:
    """Return a tiny model with the same operations. The vocabulary size stays, since it is that of the data."""
    small = replace(model_spec, hidden_size=32, num_layers=1, num_heads=2, head_dim=16, ffn_size=64)
    small = replace(small, num_kv_heads=1 if model_spec.num_kv_heads < model_spec.num_heads else 2)
    if not model_spec.num_experts:
        return small
    limit = partial(min, 4)
    return replace(
        small,
        num_experts=limit(model_spec.num_experts),
        experts_per_token=limit(model_spec.experts_per_token),
    )
