"""Run a sweep: start trials while there is room, stop bad ones, record how each ends."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from raytrain_hpc.checkpoint.lease import Lease
from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.ray_host import open_trial_slots
from raytrain_hpc.driver.stop_signals import stop_on_signals
from raytrain_hpc.driver.trial_slots import TrialSlots
from raytrain_hpc.errors import ConfigError, RunDirectoryError
from raytrain_hpc.storage.location import Location
from raytrain_hpc.storage.working_copy import get_working_directory
from raytrain_hpc.sweeps.median_rule import Curve, find_worse_than_median
from raytrain_hpc.sweeps.search_algorithm import GridSearch
from raytrain_hpc.sweeps.sweep_plan import SweepPlan
from raytrain_hpc.sweeps.sweep_result import SweepResult
from raytrain_hpc.sweeps.sweep_table import describe_trial
from raytrain_hpc.sweeps.trial import State, Trial
from raytrain_hpc.sweeps.trial_process import OUTPUT_FILE, TrialProcess
from raytrain_hpc.sweeps.trial_request import ARGUMENTS_FILE, TrialRequest, save_arguments

TRIAL_COMMAND = (sys.executable, "-m", "raytrain_hpc.cli.trial")
STOPPED = 3  # exit code of a run that was stopped on request, with its state saved
_EARLIER_TRIALS_TIMEOUT_S = 600.0  # for the step and the checkpoint after which they end
_TRIALS_PER_TPE_SLOT = 4  # TPE learns from the trials that have ended, so only a part of them runs at a time


def run_sweep(
    plan: SweepPlan,
    arguments: Mapping[str, Any] | None = None,
    *,
    log: Callable[[str], None] = lambda line: None,
    command: Sequence[str] = TRIAL_COMMAND,
    poll_s: float = 0.5,
) -> SweepResult:
    """Run the trials of a sweep that have not finished yet, until all have or Ctrl-C or SIGTERM is received.

    `arguments`: keyword arguments of `api.train`, copied to each trial. `command`: starts the process of a trial, which
    receives a TrialRequest. Metrics are read every `poll_s` seconds.

    Raises:
        RunDirectoryError: Another sweep runs in the directory, or the directory cannot be written.
        ClusterError: Ray cannot be reached or started.
        ModelError: `arguments` cannot be pickled.
    """
    stop = threading.Event()
    Lease.wait_until_available(plan.directory, log)
    lease = Lease.acquire(plan.directory, owner=plan.config.run.name)
    try:
        recorded = plan.record.load()
        with (
            _store_arguments(plan.directory, arguments) as arguments_path,
            stop_on_signals(stop),
            lease.renew_in_background(stop.set),
        ):
            _wait_for_earlier_trials(recorded, stop, log, poll_s)
            with open_trial_slots(plan.config, plan.options.at_once or 1) as slots:
                return _SweepRunner(plan, recorded, slots, stop, log, command, arguments_path).run(poll_s)
    finally:
        lease.release()


@contextmanager
def _store_arguments(directory: Location, arguments: Mapping[str, Any] | None) -> Iterator[Path | None]:
    """Keep `arguments` in a file on this host during the context. Yield its path, or None without arguments."""
    path = get_working_directory(directory) / ARGUMENTS_FILE
    try:
        if arguments:
            save_arguments(arguments, path)
        yield path.absolute() if arguments else None
    finally:
        path.unlink(missing_ok=True)


def _wait_for_earlier_trials(
    recorded: Sequence[Trial], stop: threading.Event, log: Callable[[str], None], poll_s: float
) -> None:
    """Wait while trials of a sweep that was killed are saving their state, which each does by itself."""
    waiting = [trial for trial in recorded if trial.state == "running"]
    deadline = time.monotonic() + _EARLIER_TRIALS_TIMEOUT_S
    reported: set[Location] = set()
    while waiting and not stop.is_set():
        trial = waiting[-1]
        try:
            Lease.check_available(trial.run_dir)
        except RunDirectoryError as error:
            if time.monotonic() > deadline:
                return  # the trial is started, and fails with this error
            if trial.run_dir not in reported:
                log(f"{_describe(trial)}: waiting for its process of an earlier sweep to end: {error}")
                reported.add(trial.run_dir)
            time.sleep(poll_s)
        else:
            waiting.pop()


class _SweepRunner:
    """State of a running sweep."""

    def __init__(
        self,
        plan: SweepPlan,
        recorded: Sequence[Trial],
        slots: TrialSlots,
        stop: threading.Event,
        log: Callable[[str], None],
        command: Sequence[str],
        arguments_path: Path | None,
    ):
        self._plan, self._slots, self._stop, self._log, self._command = plan, slots, stop, log, command
        self._arguments_path = arguments_path
        self._options = plan.options
        # An earlier sweep over a grid may have had another metric.
        recorded = [trial.measure(plan.options.metric) if trial.is_finished else trial for trial in recorded]
        self._trials = {trial.settings: trial for trial in recorded}
        self._candidates = self._generate_trials(recorded)
        self._next: Trial | None = None  # waits for room
        self._running: list[TrialProcess] = []
        self._is_stopping = False
        self._curves: dict[tuple[str, ...], Curve] = {}  # of finished trials, by settings
        for trial in recorded:
            plan.search.exclude(trial.settings)  # also of a trial that is still to be continued
            if trial.is_finished:
                plan.search.tell(trial)
                self._add_curve(trial)
        self._max_running = self._options.at_once or self._choose_max_running()

    def run(self, poll_s: float) -> SweepResult:
        """Run trials until all have ended, or until stopped."""
        at_once, free = self._max_running, self._slots.free
        room = ""
        if not self._options.at_once:
            at_once = min(at_once, max(1, free // self._slots.count(self._plan.config)))
            room = f" in {free} free slots"
        size = f"a trial takes {self._slots.count(self._plan.config)} {self._slots.resource}s"
        self._log(f"{self._plan.num_trials} trials in {self._plan.directory}, {at_once} at a time{room}; {size}")
        try:
            self._start_trials()
            while self._running:
                time.sleep(poll_s)
                has_ended = self._collect_ended()
                if self._stop.is_set():
                    self._stop_all()
                    continue
                self._stop_bad()
                if has_ended:
                    self._start_trials()
        except BaseException:
            TrialProcess.kill_all(self._running)
            raise
        return self._make_result()

    def _choose_max_running(self) -> int:
        """Return the highest number of trials at a time that is reasonable for the search."""
        num_trials = self._plan.num_trials
        return max(1, num_trials // _TRIALS_PER_TPE_SLOT) if self._options.search == "tpe" else num_trials

    def _generate_trials(self, recorded: Sequence[Trial]) -> Iterator[Trial]:
        """Yield the trials to run: those of an earlier command that are not finished, then new ones."""
        first, count = 0, self._plan.num_trials
        if self._options.search != "grid":
            yield from (trial for trial in recorded if not trial.is_finished)
            first, count = max((trial.number for trial in recorded), default=-1) + 1, count - len(recorded)
        for number in range(first, first + count):
            settings = self._plan.search.ask(number)
            if settings is None:
                return
            trial = self._plan.make_trial(number, settings)
            earlier = self._trials.get(settings)
            if earlier is None:
                yield trial
            elif not earlier.is_finished:
                yield replace(trial, run_dir=earlier.run_dir)  # earlier versions named directories in another way
            else:
                self._trials[settings] = replace(earlier, number=number)  # a grid may have been extended

    def _start_trials(self) -> None:
        """Start trials while there is room for the next one. With nothing running there always is."""
        while not self._stop.is_set() and len(self._running) < self._max_running:
            # A search is asked as late as possible, so that it knows the results of as many trials as possible.
            if self._next is None and self._has_room(self._plan.config):
                self._next = self._take_next()
            if self._next is None or not self._has_room(self._plan.build_trial_config(self._next)):
                return
            trial, self._next = self._next, None
            self._start(trial)

    def _take_next(self) -> Trial | None:
        """Return the next trial with valid settings, None after the last."""
        for trial in self._candidates:
            try:
                self._plan.build_trial_config(trial)
            except ConfigError as error:  # of a random combination of values
                self._log(f"{_describe(trial)}: {error}")
                self._finish(trial, "failed", error.exit_code)
            else:
                return trial
        return None

    def _has_room(self, config: Config) -> bool:
        if self._options.at_once or not self._running:
            return True
        configs = [*(self._plan.build_trial_config(process.trial) for process in self._running), config]
        return sum(map(self._slots.count, configs)) <= self._slots.free

    def _start(self, trial: Trial) -> None:
        trial = replace(trial, state="running")
        config = self._plan.build_trial_config(trial, self._slots.words)
        request = TrialRequest(config, self._arguments_path, tuple(sys.path))
        self._record(trial)
        self._running.append(TrialProcess(trial, request, self._command, self._slots, self._options.metric))
        self._log(f"{_describe(trial)}: started, {len(self._running)} running")

    def _collect_ended(self) -> bool:
        """Record the trials whose processes have ended. Return whether there were any."""
        ended = [process for process in self._running if process.exit_code is not None]
        for process in ended:
            self._running.remove(process)
            process.stop()  # closes the pipe
            try:
                process.save_output()
            except OSError as error:
                self._log(f"alarm: {process.trial.run_dir}/output.log cannot be written: {error.strerror}")
            code = process.exit_code or 0
            state: State = "done" if code == 0 else "failed"
            if code and process.is_stopped_early:
                state = "stopped early"
            elif code == STOPPED or (code and self._stop.is_set()):
                state = "interrupted"
                if not self._stop.is_set():  # by its deadline, or by someone: further trials would not get far either
                    self._log(f"{_describe(process.trial)}: stopped from outside, so the sweep stops")
                    self._stop.set()
            self._finish(process.trial.measure(self._options.metric), state, code)
        return bool(ended)

    def _finish(self, trial: Trial, state: State, exit_code: int) -> None:
        """Record how a trial has ended, and tell the search."""
        trial = replace(trial, state=state, exit_code=exit_code)
        self._record(trial)
        self._add_curve(trial)
        if state != "interrupted":
            self._plan.search.tell(trial)
        metric = self._options.metric
        result = f"no {metric}" if trial.value is None else f"{metric} {trial.value:.5g}"
        log_path = trial.run_dir / OUTPUT_FILE
        endings = {"done": f"done, {result}", "stopped early": f"stopped early, {result}"}
        failure = f"exit code {exit_code}" + (f", see {log_path}" if log_path.is_file() else "")
        self._log(f"{_describe(trial)}: {endings.get(state, 'interrupted' if state == 'interrupted' else failure)}")

    def _record(self, trial: Trial) -> None:
        self._trials[trial.settings] = trial
        try:
            self._plan.record.save(list(self._trials.values()))
        except RunDirectoryError as error:  # the next change is written with all others
            self._log(f"alarm: {error}; the sweep continues")

    def _add_curve(self, trial: Trial) -> None:
        if self._options.stop_bad and trial.is_finished:
            points = trial.read_points(self._options.metric)
            self._curves[trial.settings] = Curve(points, is_stopped=trial.state == "stopped early")

    def _stop_bad(self) -> None:
        """Stop the running trials that are worse than the median of the others."""
        if not self._options.stop_bad:
            return
        updated = [process for process in self._running if process.follower.read_new_points()]
        for process in updated:
            if process.is_stopped_early:
                continue
            curves = [curve for settings, curve in self._curves.items() if settings != process.trial.settings]
            curves += [Curve(p.follower.points, p.is_stopped_early) for p in self._running if p is not process]
            bad = find_worse_than_median(process.follower.points, curves, self._options.mode, self._plan.min_steps)
            if bad is not None:
                process.is_stopped_early = True
                process.stop()
                values = f"{self._options.metric} {bad.best:.5g} is worse than {bad.median:.5g}"
                reason = f"{values}, the median of {bad.num_trials} other trials"
                self._log(f"{_describe(process.trial)}: stopping at step {bad.step}: {reason}")

    def _stop_all(self) -> None:
        """Request all running trials to save and stop, once."""
        if not self._is_stopping:
            self._is_stopping = True
            self._log(f"stopping: {len(self._running)} running trials save their state and stop")
        for process in self._running:
            process.stop()

    def _make_result(self) -> SweepResult:
        """Return the trials of this sweep. A grid may have been a larger one before."""
        trials = list(self._trials.values())
        if isinstance(self._plan.search, GridSearch):
            wanted = set(self._plan.search.combinations)
            trials = [trial for trial in trials if trial.settings in wanted]
        is_complete = not self._stop.is_set() and all(trial.state != "interrupted" for trial in trials)
        in_order = tuple(sorted(trials, key=lambda trial: trial.number))
        return SweepResult(in_order, is_complete, self._options.metric, self._options.mode)


def _describe(trial: Trial) -> str:
    """Return the name and the settings of a trial for a log line."""
    settings = describe_trial(replace(trial, state="done"))
    return f"{trial.name} {settings}" if trial.name.startswith("trial-") else settings
