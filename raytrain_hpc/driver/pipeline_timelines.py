"""Pipeline timelines of all ranks, written to run.dir/timeline as JSON and SVG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytrain_hpc.planner.pipeline_schedule import Action
from raytrain_hpc.planner.pipeline_timeline import Span, compute_idle_fraction, render_svg


class TimelineWriter:
    """Writer of the pipeline actions of each step, from all ranks. Clocks of different nodes are not aligned."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._incomplete: dict[int, dict[int, list[list[Any]]]] = {}

    def discard_incomplete(self) -> None:
        """Discard steps that not all ranks of an earlier generation have reported. Call when a generation starts."""
        self._incomplete.clear()

    def add_rank(self, record: dict[str, Any], world: int) -> str | None:
        """Add one rank's actions of a step, and write the step once all `world` ranks have reported it.

        Returns the written file's name with the pipeline's idle share, or None if ranks are missing. Raises OSError if
        the files cannot be written.
        """
        step = record["step"]
        spans_of_rank = self._incomplete.setdefault(step, {})
        spans_of_rank[record["rank"]] = record["spans"]
        if len(spans_of_rank) < world:
            return None
        del self._incomplete[step]
        rows = [[rank, *row] for rank in sorted(spans_of_rank) for row in spans_of_rank[rank]]
        spans = [
            Span(rank, Action(kind, stage, microbatch), begin, end)
            for rank, kind, stage, microbatch, begin, end in rows
        ]
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"step-{step:08d}"
        columns = ["rank", "kind", "stage", "microbatch", "begin_unix", "end_unix"]
        path.with_suffix(".json").write_text(json.dumps({"columns": columns, "rows": rows}) + "\n")
        path.with_suffix(".svg").write_text(render_svg(spans, world))
        return f"{path.name}.svg (pipeline idle {100 * compute_idle_fraction(spans, world):.1f} %)"
