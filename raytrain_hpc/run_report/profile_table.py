"""Profiled steps in the report: shares of GEMM, attention, communication and idle time, and the longest operations."""

from __future__ import annotations

from html import escape

from raytrain_hpc.observability.kernel_summary import KINDS, KernelSummary
from raytrain_hpc.run_report.html_table import render_table
from raytrain_hpc.run_report.run_reader import RunRecord, StepProfile

_MAX_OPERATIONS = 15
_MAX_NAME_CHARS = 120


def render_profiles(run: RunRecord) -> str:
    """Return the shares of every profiled rank, and the longest operations of the first; empty without a profile."""
    if not run.profiles:
        return ""
    first = run.profiles[0]
    kernels = first.kernels
    names = ("rank", "steps", *(f"{kind} (%)" for kind in KINDS), "idle (%)", "busy (ms)", "profiled (ms)")
    shares = render_table(names, [_render_shares(profile) for profile in run.profiles])
    operations = render_table(
        ("kernel" if kernels.device != "cpu" else "operator", "kind", "calls", "time (ms)", "share (%)"),
        [
            [
                escape(_shorten(row.name)),
                row.kind,
                str(row.calls),
                _to_ms(row.seconds),
                _to_percent(row.seconds, kernels),
            ]
            for row in kernels.operations[:_MAX_OPERATIONS]
        ],
    )
    return f'{shares}<p class="note">{_explain(first)}</p>{operations}'


def _render_shares(profile: StepProfile) -> list[str]:
    kernels = profile.kernels
    shares = [f"{100 * kernels.compute_share(kind):.1f}" for kind in KINDS] + [f"{100 * kernels.idle_share:.1f}"]
    steps = f"{profile.first_step} to {profile.last_step}"
    return [str(profile.rank), steps, *shares, _to_ms(kernels.busy_s), _to_ms(kernels.window_s)]


def _explain(profile: StepProfile) -> str:
    operations = "kernels of the GPU" if profile.kernels.device != "cpu" else "operators, each without those it calls"
    return (
        f"Shares are parts of the time of all {operations}; idle is the part of the profiled time in which none ran. "
        f"Below: the longest of rank {profile.rank}. The directory profile/ has the trace."
    )


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_CHARS else f"{name[: _MAX_NAME_CHARS - 1]}…"


def _to_ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _to_percent(seconds: float, kernels: KernelSummary) -> str:
    return f"{100 * seconds / kernels.busy_s if kernels.busy_s else 0.0:.1f}"
