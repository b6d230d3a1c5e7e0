"""Request of a sweep to the process of a trial, on its standard input: what to train, and when to stop."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.parent_pipe import read_message, wait_until_closed
from raytrain_hpc.errors import ModelError
from raytrain_hpc.ray_private import pickle_with_ray

ARGUMENTS_FILE = "arguments.pickle"


@dataclass(frozen=True)
class TrialRequest:
    """What a trial trains.

    `arguments_path`: file that `save_arguments` has written; None for the arguments that `train` has by default.
    `search_paths`: where the process of the sweep finds modules, which those of the user's objects may be.
    """

    config: Config
    arguments_path: Path | None = None
    search_paths: tuple[str, ...] = ()

    def send(self, pipe: IO[bytes]) -> None:
        """Write the request into the standard input of a process that calls `receive_request`, and keep it open.

        Closing the pipe requests the trial to save and stop after the current step. The end of this process closes it
        too, however it ends, so a trial does not outlive its sweep by more than a step and a checkpoint.
        """
        pickle.dump(self, pipe)
        pipe.flush()

    def load_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `train`. Call in the process of the trial."""
        if self.arguments_path is None:
            return {}
        sys.path += [path for path in self.search_paths if path not in sys.path]
        arguments: dict[str, Any] = pickle.loads(self.arguments_path.read_bytes())
        return arguments


def receive_request() -> TrialRequest | None:
    """Read the request, and raise SIGTERM in this process when the pipe is closed. None if the sweep has ended.

    Call once, at the start of the process. Its standard input is empty afterwards.
    """
    request: TrialRequest
    try:
        request, pipe = read_message()
    except EOFError:
        return None
    threading.Thread(target=_stop_when_closed, args=(pipe,), name="sweep", daemon=True).start()
    return request


def _stop_when_closed(pipe: int) -> None:
    wait_until_closed(pipe)
    os.kill(os.getpid(), signal.SIGTERM)


def save_arguments(arguments: Mapping[str, Any], path: Path) -> None:
    """Pickle keyword arguments of `train` by value, so that functions and classes of a notebook can be among them.

    Raises ModelError for objects that cannot be pickled.
    """
    try:
        content = pickle_with_ray(dict(arguments))
    except Exception as error:  # of any type: the objects are the user's
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        names = ", ".join(arguments)
        raise ModelError(f"sweep: each trial needs a copy of {names}, which cannot be pickled: {reason}") from error
    path.write_bytes(content)
