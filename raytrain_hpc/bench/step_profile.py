"""Profile of one training step of a benchmark."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from raytrain_hpc.observability.kernel_summary import KernelSummary
from raytrain_hpc.observability.profiler import summarize_profile
from raytrain_hpc.torch_device import synchronize


def profile_step(train_step: Callable[[], object], device: torch.device) -> KernelSummary:
    """Run a step under torch's profiler. Return its kernels on a GPU, or its operators on a CPU."""
    activity: ProfilerActivity = getattr(ProfilerActivity, device.type.upper())
    with profile(activities=[activity]) as profiler:
        train_step()
        synchronize(device)
    return summarize_profile(profiler)
