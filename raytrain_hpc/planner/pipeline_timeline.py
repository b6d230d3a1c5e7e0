"""Pipeline timelines, simulated from a schedule or recorded: bubble, activations in flight, and an SVG picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raytrain_hpc.planner.pipeline_schedule import Action, PipelineOrder

_COLORS = {"F": "#4c78a8", "B": "#e45756", "I": "#e45756", "W": "#54a24b"}
_ROW_HEIGHT, _WIDTH, _LEFT_MARGIN = 28, 1200, 64


@dataclass(frozen=True, slots=True)
class Span:
    """One action of a rank, from `begin` to `end` in seconds."""

    rank: int
    action: Action
    begin: float
    end: float


def simulate(
    orders: Sequence[PipelineOrder], seconds: Callable[[Action], float], num_stages: int, transfer_s: float = 0.0
) -> list[Span]:
    """Simulate the ranks' orders and return when each action runs, as early as its inputs allow.

    A forward pass needs that of the stage before it. A backward pass needs that of the stage after it and its own
    forward pass. A weight pass needs its own input pass. Results from another rank arrive `transfer_s` later. Raises
    ValueError if the ranks wait for each other.
    """
    done: dict[Action, Span] = {}
    clocks, next_index = [0.0] * len(orders), [0] * len(orders)
    while any(index < len(order) for index, order in zip(next_index, orders, strict=True)):
        has_progress = False
        for rank, order in enumerate(orders):
            while next_index[rank] < len(order) and all(
                dependency in done for dependency in _list_dependencies(order[next_index[rank]], num_stages, done)
            ):
                action = order[next_index[rank]]
                ready_times = [
                    done[dependency].end + (transfer_s if done[dependency].rank != rank else 0.0)
                    for dependency in _list_dependencies(action, num_stages, done)
                ]
                begin = max([clocks[rank], *ready_times])
                clocks[rank] = begin + seconds(action)
                done[action] = Span(rank, action, begin, clocks[rank])
                next_index[rank] += 1
                has_progress = True
        if not has_progress:
            waiting = [str(order[index]) for index, order in zip(next_index, orders, strict=True) if index < len(order)]
            raise ValueError(f"deadlock in the pipeline orders: the ranks wait at {', '.join(waiting)}")
    return list(done.values())


def _list_dependencies(action: Action, num_stages: int, done: dict[Action, Span]) -> list[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, m)]
    forward = Action("F", stage, m)
    if stage == num_stages - 1:
        return [forward]
    backward = Action("B", stage + 1, m)  # the next stage may or may not split its backward pass
    return [forward, backward if backward in done else Action(action.kind, stage + 1, m)]


def compute_idle_fraction(spans: Iterable[Span], num_ranks: int) -> float:
    """Return the share of all ranks' time, from the first action to the last, in which they are idle."""
    spans = list(spans)
    wall = max(span.end for span in spans) - min(span.begin for span in spans)
    return 1.0 - sum(span.end - span.begin for span in spans) / (num_ranks * wall)


def compute_bubble_s(spans: Iterable[Span]) -> float:
    """Return the longest time that a rank waits between its own first and last action.

    As defined by Qi et al. 2023 (arXiv 2401.10241). The staggered start of the ranks does not count, since the next
    step can begin in the same staggered way.
    """
    spans_by_rank: dict[int, list[Span]] = {}
    for span in spans:
        spans_by_rank.setdefault(span.rank, []).append(span)
    longest = max(
        max(span.end for span in rank_spans) - min(span.begin for span in rank_spans)
        for rank_spans in spans_by_rank.values()
    )
    busy = max(sum(span.end - span.begin for span in rank_spans) for rank_spans in spans_by_rank.values())
    return longest - busy


class StageLoad(NamedTuple):
    """Microbatches of a stage that a rank holds at a time.

    `in_flight`: with activations, from the forward pass to the last backward pass. `deferred`: of these, the ones
    between the two parts of a split backward pass.
    """

    in_flight: int
    deferred: int


def list_peak_loads(order: PipelineOrder) -> list[dict[int, StageLoad]]:
    """Return the loads of a rank's stages after the actions that leave most to hold.

    Each is the load after some action. After every action no stage holds more than in one of them, of both kinds.
    """
    load = {action.stage: StageLoad(0, 0) for action in order}
    loads: list[dict[int, StageLoad]] = []
    for action in order:
        in_flight, deferred = load[action.stage]
        in_flight += {"F": 1, "I": 0}.get(action.kind, -1)
        deferred += {"I": 1, "W": -1}.get(action.kind, 0)
        load = load | {action.stage: StageLoad(in_flight, deferred)}
        if not any(_is_covered(load, other) for other in loads):
            loads = [other for other in loads if not _is_covered(other, load)] + [load]
    return loads


def _is_covered(load: Mapping[int, StageLoad], other: Mapping[int, StageLoad]) -> bool:
    return all(count <= limit for stage in load for count, limit in zip(load[stage], other[stage], strict=True))


def render_svg(spans: Iterable[Span], num_ranks: int) -> str:
    """Render the timeline as SVG with one row per rank: forward blue, backward red, weights green."""
    spans = list(spans)
    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    scale = _WIDTH / (end - start)
    height = num_ranks * _ROW_HEIGHT + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT_MARGIN + 8}" height="{height}">',
        f'<text x="4" y="16" font-size="12">idle {100 * compute_idle_fraction(spans, num_ranks):.1f} % '
        f"of {end - start:.3f} s</text>",
    ]
    for rank in range(num_ranks):
        parts.append(f'<text x="4" y="{rank * _ROW_HEIGHT + 44}" font-size="12">rank {rank}</text>')
    for span in spans:
        x, width = _LEFT_MARGIN + (span.begin - start) * scale, (span.end - span.begin) * scale
        y = span.rank * _ROW_HEIGHT + 28
        title = f"{span.action} {1000 * (span.end - span.begin):.2f} ms"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW_HEIGHT - 4}" '
            f'fill="{_COLORS[span.action.kind]}" stroke="white" stroke-width="0.5"><title>{title}</title></rect>'
        )
        if width > 14:
            parts.append(
                f'<text x="{x + 2:.2f}" y="{y + 16}" font-size="9" fill="white">{span.action.microbatch}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
