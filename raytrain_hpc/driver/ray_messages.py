"""Ray's messages about dead workers: shortened where the run reports them, hidden where the run has its own line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ray.exceptions import OutOfMemoryError

from raytrain_hpc.ray_private import LogPrinter, replace_log_printer

_EXIT_DETAIL = re.compile(r"Worker exit detail: (.*?)\.?(?: Some common causes include|$)")
_KILLED_OR_CRASHED = "connection error code 2"  # Ray learns of the death from a closed connection only
_MEMORY = re.compile(r"was ([\d.]+) ?GB (?:used )?/ ([\d.]+) ?GB")  # of the node, in an OutOfMemoryError
_IDENTIFIER = re.compile(r"\b[0-9a-f]{32,}\b")
_DEATH_MESSAGES = ("A worker died or was killed", "The node with node id")
# Ray's gauges are exported by an agent of each node, which a run does not need: it is absent or starts late.
_NO_METRICS_AGENT = re.compile(r"Failed to establish connection to the (event\+)?metrics exporter agent")
_RAYLET_DIED, _RAYLET_LOG = "Raylet is terminated.", " Last "  # the message, and what precedes 20 lines of its log


def extract_last_line(error: BaseException) -> str:
    """Return the last line of a Ray error's text, which names the problem."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def describe_actor_death(error: BaseException) -> str:
    """Return in a few words why an actor has died, from the error that Ray raised for a call to it."""
    if isinstance(error, OutOfMemoryError):
        memory = _MEMORY.search(str(error))
        used = f": {memory[1]} of {memory[2]} GB were in use" if memory is not None else ""
        return f"Ray killed its process, because its node ran low on memory{used}"
    line = extract_last_line(error)
    match = _EXIT_DETAIL.search(line)
    if match is not None and _KILLED_OR_CRASHED in match[1]:
        return "its process was killed or crashed"
    return _IDENTIFIER.sub("...", f"its process ended: {match[1]}" if match else line)


class DeathMessageFilter:
    """Filter of what Ray prints in the driver: hides its messages about the death of workers that the run reports.

    The end of a raylet, which names no node, is printed without its log. That Ray exports no metrics is not printed.
    Output of workers and all other messages of Ray are still printed.
    """

    def __init__(self) -> None:
        self._markers: set[str] = set()
        self._print: LogPrinter | None = None  # Ray's own, while the filter is installed

    def install(self) -> None:
        """Begin to filter. Call once."""
        self._print = replace_log_printer(self._print_others)

    def remove(self) -> None:
        """End the filter, and print everything again."""
        if self._print is not None:
            replace_log_printer(self._print)
            self._print = None

    def hide(self, infos: Iterable[Mapping[str, Any]]) -> None:
        """Hide messages about the death of these workers and of their nodes from now on. `infos`: their host facts."""
        for info in infos:
            self._markers |= {f"Worker PID: {info['pid']} ", f"node id: {info['node_id']} "}

    def _print_others(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        lines = [line for line in data["lines"] if not _NO_METRICS_AGENT.search(line)]
        if data.get("pid") == "raylet":
            lines = [_shorten(line) for line in lines if not self._is_hidden(line)]
        if lines and self._print is not None:
            self._print({**data, "lines": lines}, *args, **kwargs)

    def _is_hidden(self, line: str) -> bool:
        return line.lstrip().startswith(_DEATH_MESSAGES) and any(marker in line for marker in self._markers)


def _shorten(line: str) -> str:
    reasons, log, _ = line.partition(_RAYLET_LOG)
    return f"{reasons} See raylet.out on its node." if log and line.startswith(_RAYLET_DIED) else line
