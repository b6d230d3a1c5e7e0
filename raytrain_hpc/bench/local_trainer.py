"""A trainer in the benchmark's own process, to be stepped by the benchmark."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.errors import ClusterError
from raytrain_hpc.planner.hardware_defaults import resolve_compile, resolve_dtype
from raytrain_hpc.runtime.control_channel import ControlChannel
from raytrain_hpc.runtime.worker_spec import WorkerSpec
from raytrain_hpc.torch_device import find_accelerator, is_accelerator
from raytrain_hpc.training.builder import build_trainer
from raytrain_hpc.training.trainer import Trainer


def require_gpu(benchmark: str) -> torch.device:
    """Return the GPU to measure on.

    Raises:
        ClusterError: This machine has no usable GPU.
    """
    device = find_accelerator()
    if device is None:
        raise ClusterError(f"bench {benchmark}: this machine has no usable GPU; run it on a machine with one")
    return device


@contextmanager
def open_trainer(config: Config, device: torch.device) -> Iterator[Trainer]:
    """Build the trainer of a run with one rank, and prefetch its data for all of train.steps."""
    release_memory()
    has_accelerator = is_accelerator(device)
    config = resolve_compile(resolve_dtype(config, has_bf16=has_accelerator), has_accelerator=has_accelerator)
    prepared = prepare_run(config, None, lambda line: None)
    layout, batching = prepared.resolve_layout(1)
    spec = WorkerSpec(
        config=prepared.config,
        layout=layout,
        batching=batching,
        model_spec=prepared.model_spec,
        dataset_hash=prepared.dataset.dataset_hash,
        custom=None,
        generation=1,
        resume_step=None,
        end_step=config.train.steps,
    )
    trainer = build_trainer(spec, 0, device, None, ControlChannel())
    with trainer.loader.prefetch(0, config.train.steps):
        yield trainer


def release_memory() -> None:
    """Free the GPU memory and the compiled code of trainers that are no longer used."""
    gc.collect()
    torch.compiler.reset()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
