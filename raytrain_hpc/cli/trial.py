"""Process of one trial of a sweep. Not a command for users: `sweep` starts it, and writes to its standard input."""

from __future__ import annotations

import sys

from raytrain_hpc.cli.options import EXIT_STOPPED, print_errors_on_one_line
from raytrain_hpc.cli.train import train_and_summarize
from raytrain_hpc.sweeps.trial_request import receive_request


@print_errors_on_one_line
def train_trial() -> None:
    """Train as the sweep requests, and print what `train` prints."""
    request = receive_request()
    if request is None:
        sys.exit(EXIT_STOPPED)
    train_and_summarize(request.config, request.load_arguments())


if __name__ == "__main__":
    train_trial()
