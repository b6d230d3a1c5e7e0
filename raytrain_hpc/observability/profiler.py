"""Profiles of selected steps on selected ranks, written to run.dir/profile."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.config.schema import ProfilerConfig
from raytrain_hpc.errors import MissingDependencyError


class StepProfiler(Callback):
    """Profiler of the steps profiler.steps of one rank."""

    priority = 200  # around the other callbacks of a step

    def __init__(self, config: ProfilerConfig, rank: int, run_dir: Path):
        self._profiler_name = config.name
        self._first, self._end = config.steps
        self._output_path = run_dir / "profile" / f"rank-{rank:05d}"
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
        if self._profiler is not None:
            _write_profile(self._profiler_name, self._profiler, self._output_path)
            self._profiler = None


def check_profiler(config: ProfilerConfig) -> None:
    """Raise MissingDependencyError if the selected profiler is not installed."""
    if config.name == "pyinstrument" and find_spec("pyinstrument") is None:
        raise MissingDependencyError("profiler.name=pyinstrument: not installed; run `pip install pyinstrument`")


def _start_profiler(profiler_name: str) -> Any:
    if profiler_name == "torch":
        from torch.profiler import profile

        profiler: Any = profile(record_shapes=True)
    else:
        from pyinstrument import Profiler

        profiler = Profiler()
    profiler.start()
    return profiler


def _write_profile(profiler_name: str, profiler: Any, output_path: Path) -> None:
    profiler.stop()
    if profiler_name == "torch":
        profiler.export_chrome_trace(str(output_path.with_suffix(".trace.json")))
    else:
        output_path.with_suffix(".html").write_text(profiler.output_html())
