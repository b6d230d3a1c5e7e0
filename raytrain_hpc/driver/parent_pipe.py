"""Standard input as a pipe from the process that has started this one: a message, and then its end.

The pipe ends when every process that holds its other end has closed it or has ended, however it ended.
"""

from __future__ import annotations

import os
import pickle
from typing import Any


def read_message() -> tuple[Any, int]:
    """Return the object that was pickled into standard input, and a descriptor of the pipe for `wait_until_closed`.

    Call once, at the start of the process. Standard input is empty afterwards. Raises EOFError if the pipe ends before
    the message is complete.
    """
    pipe = os.dup(0)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)
    # Buffered on a descriptor of its own: a waiting thread must hold no buffer when the interpreter ends.
    with os.fdopen(os.dup(pipe), "rb") as buffered:
        try:
            return pickle.load(buffered), pipe
        except pickle.UnpicklingError as error:
            raise EOFError(str(error)) from error


def wait_until_closed(pipe: int) -> None:
    """Wait for the end of the pipe."""
    os.read(pipe, 1)
