"""Draw loss_with_faults.svg, the picture in README.md: a run with two faults over the same run without faults.

Run `python docs/images/draw_loss_with_faults.py` in the repository. It trains both runs in runs/ on three CPU workers
and one spare, unless they are there already, and fails unless their losses are the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import raytrain_hpc as rt

OUTPUT = Path(__file__).with_name("loss_with_faults.svg")
STEPS = 200
SETTINGS = [f"train.steps={STEPS}", "train.deterministic=elastic", "cluster.workers=3", "cluster.spares=1"]
FAULTS = "fault.inject=[{kind: kill, rank: 1, step: 60}, {kind: stop, rank: 2, step: 130}]"
SIGNALS = {"died": "killed (SIGKILL)", "frozen": "frozen (SIGSTOP)"}

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 54, 16, 46, 40
X_TICKS, Y_TICKS = range(0, STEPS + 1, 25), range(1, 7)
# Colors with enough contrast on white and on GitHub's dark background; the background is transparent.
TEXT, GRID, CALM, FAULTY, MARK = "#7d8590", "#7d859040", "#4493f8", "#e16f24", "#d1242f"


def main() -> None:
    """Train what is missing, compare the losses, and write the picture."""
    calm = train("readme_no_faults", [])
    faulty = train("readme_faults", [FAULTS])
    losses, losses_with_faults = read_losses(calm), read_losses(faulty)
    if losses != losses_with_faults or len(losses) != STEPS:
        raise SystemExit("the losses of the two runs differ")
    OUTPUT.write_text(draw(losses, losses_with_faults, read_lines(faulty / "incidents.jsonl")))
    print(f"{OUTPUT}: {len(losses)} steps, the same losses bit for bit")


def train(name: str, settings: Sequence[str]) -> Path:
    """Train a run to its end, or find it trained, and return its directory."""
    return Path(rt.train(rt.load_config(None, [f"run.name={name}", *SETTINGS, *settings])).run_dir)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_losses(run: Path) -> list[float]:
    """Return the training losses of all steps; JSON keeps every bit of a float."""
    return [record["train/loss"] for record in read_lines(run / "metrics.jsonl") if "train/loss" in record]


def draw(losses: Sequence[float], losses_with_faults: Sequence[float], incidents: Sequence[dict[str, Any]]) -> str:
    """Return the SVG: the run without faults as a broad line, the one with faults as a thin line on it, the faults."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'font-family="-apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="13">',
            "<title>Training loss of a run with two faults and of the same run without faults</title>",
            *draw_axes(),
            draw_line(losses, CALM, 6, 'stroke-opacity="0.55"'),
            draw_line(losses_with_faults, FAULTY, 1.6),
            *draw_marks(incidents),
            *draw_legend(),
            "</svg>\n",
        ]
    )


def to_x(step: float) -> float:
    """Return the horizontal position of a step."""
    return LEFT + (WIDTH - LEFT - RIGHT) * step / STEPS


def to_y(loss: float) -> float:
    """Return the vertical position of a loss."""
    return TOP + (HEIGHT - TOP - BOTTOM) * (Y_TICKS[-1] - loss) / (Y_TICKS[-1] - Y_TICKS[0])


def draw_axes() -> Iterator[str]:
    """Yield grid lines, ticks and the names of both axes."""
    for loss in Y_TICKS:
        y = to_y(loss)
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{GRID}"/>'
        yield draw_text(LEFT - 8, y + 4, str(loss), "end")
    for step in X_TICKS:
        yield draw_text(to_x(step), HEIGHT - BOTTOM + 18, str(step), "middle")
    yield draw_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, "step", "middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield draw_text(14, middle, "training loss, nats per token", "middle", f'transform="rotate(-90 14 {middle:.1f})"')


def draw_line(losses: Sequence[float], color: str, width: float, attributes: str = "") -> str:
    """Return a loss curve; the first loss is that of step 1."""
    points = " ".join(f"{to_x(step):.1f},{to_y(loss):.1f}" for step, loss in enumerate(losses, 1))
    line = f'<polyline fill="none" stroke="{color}" stroke-width="{width}" stroke-linejoin="round" {attributes}'
    return f'{line} points="{points}"/>'


def draw_marks(incidents: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield a dashed line and its two labels for each incident, at the step that it interrupted."""
    for incident in incidents:
        x = to_x(incident["step"] + 1)
        yield (
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="{MARK}" '
            'stroke-width="1.5" stroke-dasharray="5 4"/>'
        )
        fault = f"step {incident['step'] + 1}: rank {incident['rank']} {SIGNALS[incident['kind']]}"
        ranks = f"{incident['world']} -> {incident['world_after']} ranks"
        yield draw_text(x + 8, TOP + 16, fault)
        yield draw_text(x + 8, TOP + 34, f"{ranks}, {incident['steps_lost']} steps repeated")


def draw_legend() -> Iterator[str]:
    """Yield the names of the two lines, above the axes."""
    for x, color, width, opacity, name in (
        (LEFT, CALM, 6, 0.55, "without faults"),
        (LEFT + 150, FAULTY, 1.6, 1, "with two faults (same bits)"),
    ):
        yield (
            f'<line x1="{x}" x2="{x + 28}" y1="18" y2="18" stroke="{color}" '
            f'stroke-width="{width}" stroke-opacity="{opacity}"/>'
        )
        yield draw_text(x + 36, 22, name)


def draw_text(x: float, y: float, text: str, anchor: str = "start", attributes: str = "") -> str:
    """Return a text at a position."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{TEXT}" {attributes}>{escape(text)}</text>'


if __name__ == "__main__":
    main()
