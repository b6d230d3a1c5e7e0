"""Profiles of chosen steps on chosen ranks, written under run.dir/profile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytrain_hpc.config.schema import ObserveConfig
from raytrain_hpc.errors import MissingDependency


class StepProfiler:
    """Starts a profiler at the first chosen step and writes its result after the last."""

    def __init__(self, observe: ObserveConfig, rank: int, run_dir: Path):
        self._kind = observe.profile if rank in observe.profile_ranks else "none"
        self._first, self._end = observe.profile_steps
        self._target = run_dir / "profile" / f"rank-{rank:05d}"
        self._active: Any = None

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around step `step` (0-based)."""
        if self._kind != "none" and step == self._first:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self._active = _started(self._kind)
        yield
        if self._active is not None and step + 1 >= self._end:
            _write(self._kind, self._active, self._target)
            self._active = None


def check_profiler(observe: ObserveConfig) -> None:
    """Raise MissingDependency where the chosen profiler is not installed."""
    if observe.profile == "pyinstrument" and find_spec("pyinstrument") is None:
        raise MissingDependency("observe.profile=pyinstrument: not installed; run `pip install pyinstrument`")


def _started(kind: str) -> Any:
    if kind == "torch":
        from torch.profiler import profile

        active: Any = profile(record_shapes=True)
    else:
        from pyinstrument import Profiler

        active = Profiler()
    active.start()
    return active


def _write(kind: str, active: Any, target: Path) -> None:
    active.stop()
    if kind == "torch":
        active.export_chrome_trace(str(target.with_suffix(".trace.json")))
    else:
        target.with_suffix(".html").write_text(active.output_html())
