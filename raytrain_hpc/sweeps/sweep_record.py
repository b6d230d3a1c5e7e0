"""sweep.json in the directory of a sweep: what is searched, and the trials so far. The same command continues it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from raytrain_hpc.errors import ConfigError, RunDirectoryError
from raytrain_hpc.storage.location import Location, write_atomically
from raytrain_hpc.sweeps.parameter import ORIGIN
from raytrain_hpc.sweeps.trial import Trial

FILE_NAME = "sweep.json"


class SweepRecord:
    """The file sweep.json.

    `search`: options that the settings of the trials depend on. `config`: common settings that results depend on.
    """

    def __init__(self, directory: Location, search: dict[str, Any], config: dict[str, Any]):
        self._directory, self._path = directory, directory / FILE_NAME
        # Compared with what is read from the file: a tuple becomes a list.
        self._search, self._config = json.loads(json.dumps([search, config]))

    def load(self) -> list[Trial]:
        """Return the recorded trials; none if there is no file yet.

        All count as interrupted if the common settings differ: `train` then continues, finds that nothing is left to
        do, or refuses the change.

        Raises:
            ConfigError: The recorded search is another one.
            RunDirectoryError: The file cannot be read.
        """
        try:
            content = json.loads(self._path.read_bytes())
            recorded_search, recorded_config = content["search"], content["config"]
            trials = [self._read_trial(trial) for trial in content["trials"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(f"{self._path}: cannot be read; choose another run.dir") from error
        for name, value in self._search.items():
            if recorded_search.get(name) != value:
                old = recorded_search.get(name)
                remedy = f"the sweep in {self._directory} has {old!r}; set it back, or choose another run.dir"
                raise ConfigError(f"--{name}", value, ORIGIN, remedy)
        if recorded_config == self._config:
            return trials
        return [Trial(t.number, t.settings, t.run_dir, "interrupted") for t in trials]

    def _read_trial(self, content: dict[str, Any]) -> Trial:
        """Return a recorded trial. Its run directory is below that of the sweep, wherever that is now."""
        trial = Trial.from_json(content)
        return replace(trial, run_dir=self._directory / trial.run_dir.name)

    def save(self, trials: Sequence[Trial]) -> None:
        """Write the file in one step. Raises RunDirectoryError if that fails."""
        content = {
            "search": self._search,
            "config": self._config,
            "trials": [trial.to_json() for trial in trials],
        }
        try:
            write_atomically(self._path, f"{json.dumps(content, indent=2)}\n".encode())
        except OSError as error:
            raise RunDirectoryError(f"{self._path} cannot be written: {error.strerror}") from error
