"""Timelines of the pipeline, as every rank reports its own: JSON and a picture in run.dir/timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from raytrain_hpc.planner.pipeline_schedule import Action
from raytrain_hpc.planner.pipeline_timeline import Span, compute_idle_fraction, render_svg


class TimelineWriter:
    """Puts a step's actions of all ranks together. Clocks of several nodes are taken as they are."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._incomplete: dict[int, dict[int, list[list[Any]]]] = {}

    def discard_incomplete(self) -> None:
        """What an earlier generation left half-done will never be complete."""
        self._incomplete.clear()

    def add_rank(self, record: dict[str, Any], world: int) -> str | None:
        """Take a rank's actions of a step. Once all ranks' are there they are written; a line that says where.

        Raises OSError where they cannot be written.
        """
        step = record["step"]
        of_rank = self._incomplete.setdefault(step, {})
        of_rank[record["rank"]] = record["spans"]
        if len(of_rank) < world:
            return None
        del self._incomplete[step]
        rows = [[rank, *row] for rank in sorted(of_rank) for row in of_rank[rank]]
        spans = [Span(rank, Action(kind, stage, m), begin, end) for rank, kind, stage, m, begin, end in rows]
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"step-{step:08d}"
        columns = ["rank", "kind", "stage", "microbatch", "begin_unix", "end_unix"]
        path.with_suffix(".json").write_text(json.dumps({"columns": columns, "rows": rows}) + "\n")
        path.with_suffix(".svg").write_text(render_svg(spans, world))
        return f"{path.name}.svg (pipeline idle {100 * compute_idle_fraction(spans, world):.1f} %)"
