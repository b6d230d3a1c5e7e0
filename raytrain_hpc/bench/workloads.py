"""Workloads of the benchmarks: settings of the platform, and the equivalent job of the PyTorch baseline."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raytrain_hpc.bench.torch_baseline import PLAIN, BaselineJob
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.data.dataset.sources import open_dataset
from raytrain_hpc.data.loader.stream import open_stream
from raytrain_hpc.device_backends import is_accelerator_type
from raytrain_hpc.planner.layout import resolve_batching, resolve_layout

# Evaluation and samples at the end of a run are never measured. A constant learning rate is the same for both sides.
COMMON_OVERRIDES = (
    "lr_scheduler.name=constant",
    "lr_scheduler.warmup_steps=0",
    "eval.samples=1",
    "logging.sample_tokens=0",
)

# 25.0 M parameters; 1,024 tokens per step in two microbatches.
MEDIUM = (
    *COMMON_OVERRIDES,
    "data.path=synthetic",
    "model.hidden_size=512",
    "model.num_layers=6",
    "model.num_heads=8",
    "model.vocab_size=11264",
    "optimizer.lr=3e-4",
    "train.seq_len=256",
    "train.global_batch_size=4",
    "train.micro_batch_size=2",
)

# The defaults, as the quickstart trains them.
SMALL = COMMON_OVERRIDES


BASELINE_DATA_STEPS = 50  # steps of tokens written for the baseline, which cycles through them


def build_baseline_job(config: Config, workers: int, directory: Path, peer: str = PLAIN) -> BaselineJob:
    """Build a job with the same weights and the same tokens in the same order. Writes the tokens to `directory`."""
    train, optimizer = config.train, config.optimizer
    vocab_size = None if config.model.vocab_size == "auto" else int(config.model.vocab_size)
    dataset = open_dataset(config.data, vocab_size=vocab_size, seed=config.run.seed)
    stream = open_stream(
        dataset,
        config.data,
        seed=config.run.seed,
        seq_len=train.seq_len,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.global_batch_size,
    )
    steps = [stream.read_microbatch(step, 0) for step in range(min(train.steps, BASELINE_DATA_STEPS))]
    windows = [np.concatenate((step.inputs, step.targets[:, -1:]), axis=1) for step in steps]
    np.save(directory / "tokens.npy", np.concatenate(windows))
    return BaselineJob(
        shape=resolve_model_spec(config.model, vocab_size=dataset.vocab_size, seq_len=train.seq_len),
        tokens=str(directory / "tokens.npy"),
        seq_len=train.seq_len,
        seed=config.run.seed,
        steps=train.steps,
        global_batch_size=train.global_batch_size,
        micro_batch_size=resolve_batching(config, resolve_layout(config, workers)).size,
        threads=config.cluster.cpu_threads,
        lr=optimizer.lr,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        grad_clip=train.max_grad_norm,
        dtype=train.dtype,
        compile=train.compile is True,
        device=config.cluster.device if is_accelerator_type(config.cluster.device) else "cpu",
        peer=peer,
    )


def make_settings(overrides: tuple[str, ...], workers: int, steps: int) -> tuple[list[str], Config]:
    """Return the overrides of a command line, and the config that they give."""
    line = [*overrides, f"cluster.workers={workers}", f"train.steps={steps}", "cluster.device=cpu"]
    return line, load_config(None, line)
