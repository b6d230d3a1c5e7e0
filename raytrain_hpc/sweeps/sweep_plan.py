"""Plan of a sweep: its options and common settings, checked before anything is written, and its trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import islice, product
from typing import Any, get_args

from raytrain_hpc.config.field import suggest_name
from raytrain_hpc.config.fixed_settings import get_rule
from raytrain_hpc.config.loader import Setting, build_config, list_settings, parse_override
from raytrain_hpc.config.schema import Config, to_dict
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.observability.metrics import METRIC_KEYS
from raytrain_hpc.run_report.comparison import flatten_config
from raytrain_hpc.storage.location import parse_location
from raytrain_hpc.sweeps.parameter import ORIGIN, Parameter, parse_parameters
from raytrain_hpc.sweeps.search_algorithm import GridSearch, OptunaSearch, SearchAlgorithm, SearchName
from raytrain_hpc.sweeps.sweep_record import SweepRecord
from raytrain_hpc.sweeps.trial import Mode, Trial

DEFAULT_TRIALS = 20
_MAX_CHECKED_COMBINATIONS = 256
_MAX_NAME_BYTES = 200  # file systems allow 255
_ALSO_CHANGE_RESULTS = ("train.steps", "train.callbacks", "eval.")  # although a run can be resumed with other values


@dataclass(frozen=True)
class SweepOptions:
    """What to search and how; the options of `raytrain-hpc sweep`.

    `num_trials`: of a random or TPE search; None for 20. `at_once`: None for as many trials as fit. `min_steps`: None
    for a quarter of train.steps.
    """

    over: tuple[str, ...]
    search: SearchName = "grid"
    num_trials: int | None = None
    seed: int = 0
    metric: str = "val/loss"
    mode: Mode = "min"
    stop_bad: bool = False
    min_steps: int | None = None
    at_once: int | None = None


def name_directory(settings: Sequence[str]) -> str:
    """Return the name of a directory for settings; other settings have another one, also where a path replaces "/"."""
    text = ",".join(settings)
    name = text.replace("/", "_").encode()[:_MAX_NAME_BYTES].decode(errors="ignore")
    return name if name == text else f"{name}-{sha256(text.encode()).hexdigest()[:8]}"


class SweepPlan:
    """A sweep that has been checked: common settings, parameters, search, and the trials recorded so far."""

    def __init__(self, config: Config, options: SweepOptions, *, has_own_metrics: bool = False):
        """Check a sweep over `config`, the common settings. Nothing is written.

        `has_own_metrics`: objects of the user may add metrics to those of this project.

        Raises:
            ConfigError: Options do not fit together, or one or a setting is invalid: with a grid, that of any trial;
                with another search, a value that is valid in no combination with values of other parameters. Or run.dir
                has another sweep.
            MissingDependencyError: optuna is needed and not installed.
            RunDirectoryError: The directory has a sweep that cannot be read.
        """
        self.config, self.options = config, options
        self.parameters: list[Parameter] = parse_parameters(options.over)
        self._settings = list_settings(config)
        self.directory = parse_location(config.run.dir)
        self._check_options(has_own_metrics=has_own_metrics or bool(config.train.callbacks))
        self.search, self.num_trials = self._make_search()
        searched: dict[str, Any] = {"search": options.search}
        if options.search != "grid":  # otherwise, a grid may be extended
            searched |= {name: getattr(options, name) for name in ("over", "seed", "metric", "mode")}
        self.record = SweepRecord(self.directory, searched, self._get_result_settings())
        self.record.load()

    @property
    def min_steps(self) -> int:
        """Number of steps before which no trial is stopped."""
        given = self.options.min_steps
        return self.config.train.steps // 4 if given is None else given

    def make_trial(self, number: int, settings: tuple[str, ...]) -> Trial:
        """Return a new trial. Those of a grid have a directory with the name of their settings."""
        name = name_directory(settings) if self.options.search == "grid" else f"trial-{number:03}"
        return Trial(number, settings, self.directory / name)

    def build_trial_config(self, trial: Trial, common: Sequence[str] = ()) -> Config:
        """Return the config of a trial. `common`: words that replace common settings. Raises ConfigError."""
        # The name tells the trials apart in reports and trackers.
        name, run_dir = Setting("run.name", trial.name, ORIGIN), Setting("run.dir", str(trial.run_dir), ORIGIN)
        settings = [*map(parse_override, common), name, *map(parse_override, trial.settings), run_dir]
        return build_config([*self._settings, *settings])

    def _get_result_settings(self) -> dict[str, Any]:
        """Return the common settings that results depend on, by key: not the cluster, the deadline or the logging."""
        return {
            key: value
            for key, value in flatten_config(to_dict(self.config)).items()
            if get_rule(key) != "changeable" or key.startswith(_ALSO_CHANGE_RESULTS)
        }

    def _make_search(self) -> tuple[SearchAlgorithm, int]:
        """Return the search, and the number of its trials, after all values have been checked."""
        options = self.options
        if options.search == "grid":
            grid = GridSearch(self.parameters)
            for number, settings in enumerate(grid.combinations):
                self.build_trial_config(self.make_trial(number, settings))
            return grid, len(grid.combinations)
        search = OptunaSearch(self.parameters, options.search, options.mode, options.seed)
        self._check_values()
        return search, options.num_trials or DEFAULT_TRIALS

    def _check_values(self) -> None:
        """Raise the ConfigError of a value, or of the end of a range, that is valid in no combination."""
        words = [[f"{parameter.key}={value}" for value in parameter.ends] for parameter in self.parameters]
        errors: dict[str, ConfigError] = {}
        valid: set[str] = set()
        for combination in islice(product(*words), _MAX_CHECKED_COMBINATIONS):
            try:
                build_config([*self._settings, *map(parse_override, combination)])
            except ConfigError as invalid:
                for word in combination:
                    errors.setdefault(word, invalid)
            else:
                valid.update(combination)
        for word, error in errors.items():
            if word not in valid:
                raise error

    def _check_options(self, *, has_own_metrics: bool) -> None:
        options, metric = self.options, self.options.metric
        for name, value, words in (("search", options.search, SearchName), ("mode", options.mode, Mode)):
            if value not in get_args(words):
                raise ConfigError(f"--{name}", value, ORIGIN, f"needs one of {', '.join(get_args(words))}")
        for name, number in (("trials", options.num_trials), ("at-once", options.at_once)):
            if number is not None and number < 1:
                raise ConfigError(f"--{name}", number, ORIGIN, "needs at least 1")
        if options.search == "grid" and options.num_trials is not None:
            remedy = "a grid trains all combinations; leave the option out, or add --search random or --search tpe"
            raise ConfigError("--trials", options.num_trials, ORIGIN, remedy)
        if options.min_steps is not None and not options.stop_bad:
            raise ConfigError("--min-steps", options.min_steps, ORIGIN, "has no effect without --stop-bad")
        if metric not in METRIC_KEYS and not has_own_metrics:
            known = [key for key in METRIC_KEYS if not key.startswith("ranks/")]
            raise ConfigError("--metric", metric, ORIGIN, suggest_name(metric, known))
        if options.stop_bad and metric.startswith("val/") and not self.config.eval.interval:
            remedy = "is computed at the end only, too late to stop a trial; set eval.interval or --metric train/loss"
            raise ConfigError("--metric", metric, "with --stop-bad", remedy)
