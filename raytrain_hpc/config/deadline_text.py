"""Text form of run.deadline: a duration, a time, or none."""

from __future__ import annotations

import re
from datetime import datetime

NO_DEADLINE = "none"
_SECONDS_PER_UNIT = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


def parse_deadline(text: str, start_unix: float) -> float | None:
    """Return the Unix time of a deadline, or None for "none". Durations count from `start_unix`.

    A duration is a number of seconds or parts with units ("1d12h", "3h30m"); a time is in ISO 8601 format, local unless
    it has an offset. Raises ValueError with what would be valid.
    """
    if text == NO_DEADLINE:
        return None
    if (seconds := _parse_duration(text)) is not None:
        if seconds <= 0:
            raise ValueError("needs a duration above 0")
        return start_unix + seconds
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        remedy = "needs a duration (3h30m, or seconds), a time (2026-12-31T18:00), auto or none"
        raise ValueError(remedy) from None


def _parse_duration(text: str) -> float | None:
    """Return the seconds of a duration, or None if the text is none."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not _DURATION.fullmatch(text):
        return None
    return sum(float(number) * _SECONDS_PER_UNIT[unit] for number, unit in _PART.findall(text))
