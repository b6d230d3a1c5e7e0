"""Profiles of selected steps on selected ranks, written to run.dir/profile."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.config.schema import ProfilerConfig
from raytrain_hpc.errors import MissingDependencyError
from raytrain_hpc.observability.kernel_summary import KernelSummary, ProfiledEvent, summarize_events

PROFILE_DIR, KERNELS_SUFFIX = "profile", ".kernels.json"


class StepProfiler(Callback):
    """Profiler of the steps profiler.steps of one rank."""

    priority = 200  # around the other callbacks of a step

    def __init__(self, config: ProfilerConfig, rank: int, run_dir: Path):
        self._profiler_name, self._rank = config.name, rank
        self._first, self._end = config.steps
        self._output_path = run_dir / PROFILE_DIR / f"rank-{rank:05d}"
        self._profiler: Any = None

    def pre_step(self) -> None:
        """Start the profiler before the first step."""
        if self._profiler is None and self.context.step == self._first:
            self._output_path.parent.mkdir(parents=True, exist_ok=True)
            self._profiler = _start_profiler(self._profiler_name)

    def post_step(self, metrics: dict[str, Any]) -> None:
        """Write the profile after the last step."""
        if self.context.step >= self._end:
            self.close()

    def close(self) -> None:
        """Write the profile, also if training ends before the last step of it."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        if self._profiler_name == "pyinstrument":
            self._output_path.with_suffix(".html").write_text(profiler.output_html())
            return
        profiler.export_chrome_trace(str(self._output_path.with_suffix(".trace.json")))
        facts = {"rank": self._rank, "first_step": self._first + 1, "last_step": min(self.context.step, self._end)}
        summary = facts | summarize_profile(profiler).to_json()
        self._output_path.with_suffix(KERNELS_SUFFIX).write_text(json.dumps(summary))


def check_profiler(config: ProfilerConfig) -> None:
    """Raise MissingDependencyError if the selected profiler is not installed."""
    if config.name == "pyinstrument" and find_spec("pyinstrument") is None:
        raise MissingDependencyError("profiler.name=pyinstrument: not installed; run `pip install pyinstrument`")


def summarize_profile(profiler: Any) -> KernelSummary:
    """Return the time of each operation in a stopped `torch.profiler.profile`: of kernels if there are any.

    Regions that were only named, as by `record_function`, are no operations. The time of an asynchronous operation
    (a collective of gloo) is that from its start to its end.
    """
    events = [event for event in profiler.events() if not event.is_user_annotation]
    kernels = [event for event in events if event.device_type.name != "CPU"]
    if kernels:
        device = kernels[0].device_type.name.lower()
        return summarize_events(device, (_read_event(event, event.time_range.elapsed_us()) for event in kernels))
    return summarize_events(
        "cpu",
        (
            _read_event(event, event.time_range.elapsed_us() if event.is_async else event.self_cpu_time_total)
            for event in events
        ),
    )


def _read_event(event: Any, self_us: float) -> ProfiledEvent:
    return ProfiledEvent(event.name, event.time_range.start, event.time_range.end, self_us)


def _start_profiler(profiler_name: str) -> Any:
    if profiler_name == "torch":
        from torch.profiler import profile

        profiler: Any = profile(record_shapes=True)
    else:
        from pyinstrument import Profiler

        profiler = Profiler()
    profiler.start()
    return profiler
