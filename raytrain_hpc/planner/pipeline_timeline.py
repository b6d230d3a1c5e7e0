"""What a pipeline does when: simulated from a schedule and times, or recorded; its bubble and its picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

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
    """The earliest times at which ranks that keep to these orders can do everything.

    A forward needs the one of the stage before, a backward that of the stage after and its own forward, weights their
    inputs; what comes from another rank arrives `transfer_s` later. Raises ValueError where ranks wait for each other.
    """
    done: dict[Action, Span] = {}
    clocks, at = [0.0] * len(orders), [0] * len(orders)
    while any(number < len(order) for number, order in zip(at, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order) and all(
                need in done for need in _list_dependencies(order[at[rank]], num_stages, done)
            ):
                action = order[at[rank]]
                ready = [
                    done[need].end + (transfer_s if done[need].rank != rank else 0.0)
                    for need in _list_dependencies(action, num_stages, done)
                ]
                begin = max([clocks[rank], *ready])
                clocks[rank] = begin + seconds(action)
                done[action] = Span(rank, action, begin, clocks[rank])
                at[rank] += 1
                moved = True
        if not moved:
            waiting = [str(order[number]) for number, order in zip(at, orders, strict=True) if number < len(order)]
            raise ValueError(f"these orders never end: the ranks wait at {', '.join(waiting)}")
    return list(done.values())


def _list_dependencies(action: Action, num_stages: int, done: dict[Action, Span]) -> list[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    if action.kind == "W":
        return [Action("I", stage, m)]
    own = Action("F", stage, m)
    if stage == num_stages - 1:
        return [own]
    whole = Action("B", stage + 1, m)  # the stage after may have split its backward pass, or not
    return [own, whole if whole in done else Action(action.kind, stage + 1, m)]


def compute_idle_fraction(spans: Iterable[Span], num_ranks: int) -> float:
    """Share of the time of all ranks, from the first action of any to the last of any, in which they do nothing."""
    spans = list(spans)
    wall = max(span.end for span in spans) - min(span.begin for span in spans)
    return 1.0 - sum(span.end - span.begin for span in spans) / (num_ranks * wall)


def compute_bubble_s(spans: Iterable[Span]) -> float:
    """Longest time that a rank waits between its own first and last action (Qi et al. 2023, arXiv 2401.10241).

    It leaves out that ranks start one after the other, since they can also end and begin the next step so.
    """
    of_rank: dict[int, list[Span]] = {}
    for span in spans:
        of_rank.setdefault(span.rank, []).append(span)
    longest = max(max(s.end for s in of) - min(s.begin for s in of) for of in of_rank.values())
    busy = max(sum(s.end - s.begin for s in of) for of in of_rank.values())
    return longest - busy


def count_max_in_flight(order: PipelineOrder) -> dict[int, int]:
    """Most microbatches of each stage whose activations a rank holds at once: from the forward to the last backward."""
    held: dict[int, int] = {}
    most: dict[int, int] = {}
    for action in order:
        if action.kind == "F":
            held[action.stage] = held.get(action.stage, 0) + 1
            most[action.stage] = max(most.get(action.stage, 0), held[action.stage])
        elif action.kind in ("B", "W"):
            held[action.stage] -= 1
    return most


def render_svg(spans: Iterable[Span], num_ranks: int) -> str:
    """The timeline as an SVG picture: a row a rank, forwards blue, backwards red, weights green."""
    spans = list(spans)
    start, end = min(span.begin for span in spans), max(span.end for span in spans)
    scale = _WIDTH / (end - start)
    height = num_ranks * _ROW_HEIGHT + 36
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + _LEFT_MARGIN + 8}" height="{height}">',
        f'<text x="4" y="16" font-size="12">idle {100 * compute_idle_fraction(spans, num_ranks):.1f} % of {end - start:.3f} s</text>',
    ]
    for rank in range(num_ranks):
        parts.append(f'<text x="4" y="{rank * _ROW_HEIGHT + 44}" font-size="12">rank {rank}</text>')
    for span in spans:
        x, width = _LEFT_MARGIN + (span.begin - start) * scale, (span.end - span.begin) * scale
        y = span.rank * _ROW_HEIGHT + 28
        title = f"{span.action} {1000 * (span.end - span.begin):.2f} ms"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW_HEIGHT - 4}" fill="{_COLORS[span.action.kind]}" '
            f'stroke="white" stroke-width="0.5"><title>{title}</title></rect>'
        )
        if width > 14:
            parts.append(
                f'<text x="{x + 2:.2f}" y="{y + 16}" font-size="9" fill="white">{span.action.microbatch}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"
