"""Search of a sweep: which settings the next trial has. Grid, or random and TPE search by optuna."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import TYPE_CHECKING, Any, Literal, Protocol

from raytrain_hpc.errors import ConfigError, MissingDependencyError
from raytrain_hpc.sweeps.parameter import ORIGIN, Choices, Parameter, Range
from raytrain_hpc.sweeps.trial import Mode, Trial

if TYPE_CHECKING:
    import optuna

SearchName = Literal["grid", "random", "tpe"]
_MAX_ATTEMPTS = 100  # to draw settings that no trial has, before the space counts as exhausted


class SearchAlgorithm(Protocol):
    """Source of the settings of trials."""

    def ask(self, number: int) -> tuple[str, ...] | None:
        """Return the settings of trial `number`, or None if all have been tried."""

    def tell(self, trial: Trial) -> None:
        """Take a trial that has ended into account."""

    def exclude(self, settings: tuple[str, ...]) -> None:
        """Take into account that a trial of an earlier command has these settings, whether or not it has ended."""


class GridSearch:
    """All combinations of the values. Raises ConfigError for a range."""

    def __init__(self, parameters: Sequence[Parameter]):
        for parameter in parameters:
            if isinstance(parameter, Range):
                text = f"{parameter.key}={'..'.join(parameter.ends)}"
                remedy = "a grid needs values, not a range; list them, or add --search random or --search tpe"
                raise ConfigError("--over", text, ORIGIN, remedy)
        values = [[f"{parameter.key}={value}" for value in parameter.ends] for parameter in parameters]
        self.combinations = list(product(*values))

    def ask(self, number: int) -> tuple[str, ...] | None:
        """Return combination `number`, or None after the last."""
        return self.combinations[number] if number < len(self.combinations) else None

    def tell(self, trial: Trial) -> None:
        """Do nothing: a grid does not depend on results."""

    def exclude(self, settings: tuple[str, ...]) -> None:
        """Do nothing: the trial of a combination is the same in every command."""


class OptunaSearch:
    """Random or TPE search.

    The settings of a trial are a function of the seed, its number and, with TPE, of the trials told until then: each
    trial has a sampler with a seed of its own. A resumed sweep therefore continues as if it had not been interrupted.
    """

    def __init__(self, parameters: Sequence[Parameter], name: SearchName, mode: Mode, seed: int):
        """Create a search. Raises MissingDependencyError without optuna."""
        try:
            import optuna
        except ImportError as error:
            raise MissingDependencyError(f"--search {name}: needs optuna; run `pip install optuna`") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # optuna would report every trial on stderr
        self._parameters, self._name, self._seed = parameters, name, seed
        self._distributions = {parameter.key: make_distribution(parameter) for parameter in parameters}
        self._study = optuna.create_study(direction="minimize" if mode == "min" else "maximize")
        self._asked: dict[int, optuna.trial.Trial] = {}  # trials without a result, by number
        self._tried: set[tuple[str, ...]] = set()

    def ask(self, number: int) -> tuple[str, ...] | None:
        """Return the settings of trial `number`, which no trial has had, or None if there are none left."""
        for attempt in range(_MAX_ATTEMPTS):
            self._study.sampler = self._make_sampler(number, attempt)
            asked = self._study.ask(self._distributions)
            settings = tuple(f"{key}={asked.params[key]}" for key in self._distributions)
            if settings not in self._tried:
                self._tried.add(settings)
                self._asked[number] = asked
                return settings
            self._study.tell(asked, state=_get_states().FAIL)  # the same settings would give the same result
        return None

    def exclude(self, settings: tuple[str, ...]) -> None:
        """Never return these settings from `ask`."""
        self._tried.add(settings)

    def tell(self, trial: Trial) -> None:
        """Tell optuna the result of a trial: of one that was asked for, or that an earlier command has run."""
        self._tried.add(trial.settings)
        states = _get_states()
        state = states.FAIL if trial.value is None or not trial.is_finished else states.COMPLETE
        if state == states.COMPLETE and trial.state == "stopped early":
            state = states.PRUNED
        asked = self._asked.pop(trial.number, None)
        if asked is None:
            self._study.add_trial(self._freeze(trial, state))
        elif state == states.PRUNED:
            asked.report(trial.value or 0.0, trial.step or 0)
            self._study.tell(asked, state=state)
        else:
            self._study.tell(asked, trial.value if state == states.COMPLETE else None, state)

    def _freeze(self, trial: Trial, state: Any) -> Any:
        """Return a trial in the form in which optuna keeps it."""
        import optuna

        texts = (setting.partition("=")[2] for setting in trial.settings)
        is_pruned = state == optuna.trial.TrialState.PRUNED
        return optuna.trial.create_trial(
            state=state,
            value=trial.value if state != optuna.trial.TrialState.FAIL else None,
            params={p.key: p.parse_value(text) for p, text in zip(self._parameters, texts, strict=True)},
            distributions=self._distributions,
            intermediate_values={trial.step or 0: trial.value or 0.0} if is_pruned else None,
        )

    def _make_sampler(self, number: int, attempt: int) -> Any:
        import optuna

        seed = derive_seed(self._seed, number, attempt)
        return optuna.samplers.RandomSampler(seed) if self._name == "random" else optuna.samplers.TPESampler(seed=seed)


def derive_seed(seed: int, number: int, attempt: int = 0) -> int:
    """Return the seed of the sampler for a trial."""
    return Random(f"{seed}/{number}/{attempt}").getrandbits(32)


def make_distribution(parameter: Parameter) -> Any:
    """Return the optuna distribution of a parameter."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(parameter, Choices):
        return CategoricalDistribution(parameter.values)
    if parameter.is_integer:
        return IntDistribution(
            int(parameter.low), int(parameter.high), log=parameter.is_log, step=int(parameter.step or 1)
        )
    return FloatDistribution(parameter.low, parameter.high, log=parameter.is_log, step=parameter.step)


def _get_states() -> Any:
    from optuna.trial import TrialState

    return TrialState
