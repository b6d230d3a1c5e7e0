"""`bench command_line`: seconds of the commands that users type most, from the start of the process to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from statistics import median
from time import perf_counter

from raytrain_hpc.bench.contenders import log_progress
from raytrain_hpc.bench.results_table import Table

_MAIN = ("-c", "from raytrain_hpc.cli.main import main; main(prog_name='raytrain-hpc')")
_COMPLETION = {
    "_RAYTRAIN_HPC_COMPLETE": "bash_complete",
    "COMP_WORDS": "raytrain-hpc train train.st",
    "COMP_CWORD": "2",
}
# name -> (arguments of the interpreter, extra environment, goal in seconds)
COMMANDS: dict[str, tuple[tuple[str, ...], dict[str, str], float | None]] = {
    "interpreter alone": (("-c", "pass"), {}, None),
    "import raytrain_hpc, without the interpreter": (("-c", "import raytrain_hpc"), {}, 0.010),
    "raytrain-hpc --help": ((*_MAIN, "--help"), {}, 0.25),
    "raytrain-hpc plan": ((*_MAIN, "plan"), {}, 0.3),
    "completion of a key": (_MAIN, _COMPLETION, 0.15),
}
RUNS_PER_ROUND = 5


def run(rounds: int) -> Table:
    """Run every command in turn, `RUNS_PER_ROUND` times per round."""
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(rounds * RUNS_PER_ROUND):
        for name, (arguments, environment, _) in COMMANDS.items():
            seconds[name].append(_time_process(arguments, environment))
        log_progress(f"run {number + 1} of {rounds * RUNS_PER_ROUND}")
    interpreter_s = median(seconds["interpreter alone"])
    table = Table("bench command_line: seconds of a command", ("command", "median s", "fastest s", "goal", "met"))
    for name, (_, _, goal) in COMMANDS.items():
        base = interpreter_s if name.startswith("import ") else 0.0
        middle = median(seconds[name]) - base
        table.add_row(name, middle, min(seconds[name]) - base, goal, None if goal is None else middle <= goal)
    table.notes.append("commands alternate; a process from its start to its end, with warm file caches")
    return table


def _time_process(arguments: tuple[str, ...], environment: dict[str, str]) -> float:
    """Return the wall seconds of an interpreter process, read from a clock of this process."""
    began = perf_counter()
    subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, check=True, stdout=subprocess.DEVNULL
    )
    return perf_counter() - began
