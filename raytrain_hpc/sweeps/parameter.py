"""Parameters of a sweep as `--over` names them: values to choose from, or a range of numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, NoReturn

from raytrain_hpc.config.aliases import suggest_key
from raytrain_hpc.config.schema import get_fields
from raytrain_hpc.config.value_types import convert_value, get_type
from raytrain_hpc.errors import ConfigError

ORIGIN = "sweep"  # of the options of a sweep, in errors: given on the command line or in Python
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})((?::[^:]*)*)")
_MIN_LOG_RATIO = 100  # from this ratio of its ends on, a range is searched on a logarithmic scale


@dataclass(frozen=True)
class Choices:
    """A key with the values to try, as written on the command line."""

    key: str
    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        """All values."""
        return self.values

    def parse_value(self, text: str) -> str:
        """Return the value of a setting."""
        return text


@dataclass(frozen=True)
class Range:
    """A key with the lowest and the highest number to try, both included. `step`: try low + n * step only."""

    key: str
    low: float
    high: float
    is_integer: bool = False
    is_log: bool = False
    step: float | None = None

    @property
    def ends(self) -> tuple[str, ...]:
        """The lowest and the highest value, as text."""
        return repr(self.low), repr(self.high)

    def parse_value(self, text: str) -> int | float:
        """Return the number of a setting."""
        return int(text) if self.is_integer else float(text)


Parameter = Choices | Range


def parse_parameters(over: Sequence[str]) -> list[Parameter]:
    """Parse all `--over` options. Raises ConfigError for one that is malformed, and for a key that is given twice."""
    parameters = [parse_parameter(text) for text in over]
    if not parameters:
        raise ConfigError("--over", "", ORIGIN, "name a key to vary, as in --over optimizer.lr=1e-3,3e-3")
    keys = [parameter.key for parameter in parameters]
    for text, key in zip(over, keys, strict=True):
        if keys.count(key) > 1:
            _refuse(text, f"{key} is given twice; write all its values in one --over")
    return parameters


def format_parameters(over: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """Return parameters given in Python as texts of `--over`: {"optimizer.lr": [1e-3, 3e-3]} -> "optimizer.lr=...".

    A value that is text is a range, or lists values itself. Raises ConfigError for a value that is neither.
    """
    if isinstance(over, str):
        return (over,)
    if not isinstance(over, Mapping):
        return tuple(over)
    return tuple(f"{key}={_format_values(key, values)}" for key, values in over.items())


def _format_values(key: str, values: Any) -> str:
    if isinstance(values, str):
        return values
    if not isinstance(values, Iterable):
        raise ConfigError(key, values, ORIGIN, 'needs a list of values, or a range as text: "1e-4..1e-2"')
    texts = [str(value) for value in values]
    for text in texts:
        if _split_values(text, text) != (text.strip(),):
            raise ConfigError(key, text, ORIGIN, "a comma separates values; put the value into quotes inside brackets")
    return ",".join(texts)


def parse_parameter(text: str) -> Parameter:
    """Parse `key=value,value,...` or `key=low..high`, which may end in `:log`, `:linear` or `:step=NUMBER`.

    A range is linear or, if its ends are above 0 and differ by a factor of 100 or more, logarithmic. It has whole
    numbers if the key takes no others.

    Raises:
        ConfigError: The text has another form, the key does not exist, or the range is empty or not of numbers.
    """
    key, equals, values = text.partition("=")
    if not key or not equals:
        _refuse(text, "must have the form key=value,value,... or key=low..high")
    if key not in get_fields():
        raise ConfigError(key, values, ORIGIN, f"no such key; {suggest_key(key)}")
    match = _RANGE.fullmatch(values)
    if match is None:
        return Choices(key, _split_values(text, values))
    low, high = Decimal(match[1]), Decimal(match[2])
    scale, step = _parse_options(text, match[3].split(":")[1:])
    if low >= high:
        _refuse(text, "the number after .. must be the larger one")
    if scale == "log" and low <= 0:
        _refuse(text, ":log needs numbers above 0; raise the lower one or write :linear")
    if step is not None:
        if not 0 < step <= high - low:
            _refuse(text, f"a step needs to be above 0 and at most {high - low}")
        high = low + (high - low) // step * step  # the last number that the steps reach
    is_integer = _takes_integers_only(key, text)
    if is_integer and any(number is not None and number != int(number) for number in (low, high, step)):
        _refuse(text, f"{key} needs whole numbers")
    is_log = scale == "log" or (not scale and step is None and low > 0 and high / low >= _MIN_LOG_RATIO)
    convert = int if is_integer else float
    return Range(key, convert(low), convert(high), is_integer, is_log, None if step is None else convert(step))


def _parse_options(text: str, options: Sequence[str]) -> tuple[str, Decimal | None]:
    """Return the scale ("log", "linear", or "" if none is given) and the step of a range."""
    scale, step = "", None
    for option in options:
        number = option.removeprefix("step=")
        if option in ("log", "linear"):
            scale = option
        elif number != option and re.fullmatch(_NUMBER, number):
            step = Decimal(number)
        else:
            _refuse(text, f":{option} is no option of a range; write :log, :linear or :step=NUMBER")
    if scale == "log" and step is not None:
        _refuse(text, "a step needs a linear scale; leave out :log or :step")
    return scale, step


def _takes_integers_only(key: str, text: str) -> bool:
    """Return whether numbers of a key are whole ones. Raises ConfigError if it takes no numbers."""
    if _accepts(key, 0.5):
        return False
    if not _accepts(key, 1):
        _refuse(text, f"{key} takes no numbers; list its values, as in {key}=value,value")
    return True


def _accepts(key: str, number: float) -> bool:
    try:
        convert_value(number, get_type(key))
    except ValueError:
        return False
    return True


def _split_values(text: str, values: str) -> tuple[str, ...]:
    """Split "1,2,1" into ("1", "2"), without repetitions, but not at commas inside brackets."""
    choices, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and not depth:
            choices.append("")
        else:
            choices[-1] += character
    if not all(choice.strip() for choice in choices):
        _refuse(text, "must have the form key=value,value,... or key=low..high")
    return tuple(dict.fromkeys(choice.strip() for choice in choices))


def _refuse(text: str, remedy: str) -> NoReturn:
    raise ConfigError("--over", text, ORIGIN, remedy)
