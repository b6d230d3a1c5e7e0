"""What the model answers while it is trained: sampled from published checkpoints, in a process beside the run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from raytrain_hpc.config.schema import Config

_SAMPLES = "samples.jsonl"
_SHOWN = 200  # characters of an answer on the console
_NICE = 10  # the run goes first
_END_S, _ANSWER_S = 120.0, 600.0  # how long answers are waited for


class Sampler:
    """Asks checkpoints the settings' prompts, one after the other.

    `line` prints; `alarm` is told of what goes wrong, the first time; later checkpoints are asked all the same.
    """

    def __init__(self, config: Config, line: Callable[[str], None], alarm: Callable[[str], None]):
        self._config, self._line, self._alarm = config, line, alarm
        self._thread: threading.Thread | None = None
        self._lock, self._asking = threading.Lock(), False
        self._next: int | None = None  # the newest checkpoint that was not asked yet
        self._alarmed = False

    def published(self, step: int) -> None:
        """The checkpoint of this step is there. Returns at once; of those that come while one is asked, the last is."""
        if not self._config.observe.prompts:
            return
        with self._lock:
            self._next = step
            if self._thread is None or not self._asking:
                self._asking = True
                self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """The run is over: its last checkpoint is asked to the end, for a while."""
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                step, self._next = self._next, None
                if step is None:
                    self._asking = False
                    return
            self._ask(step)

    def _ask(self, step: int) -> None:
        run_dir, tokens = Path(self._config.run.dir), self._config.observe.sample_tokens
        for prompt in self._config.observe.prompts:
            words = ["--prompt", prompt, "--max-tokens", str(max(1, tokens)), "--temperature", "0", "--step", str(step)]
            command = ["nice", "-n", str(_NICE), sys.executable, "-m", "raytrain_hpc", "generate", str(run_dir), *words]
            done, wrong = _answered(command)
            if wrong:
                if not self._alarmed:
                    self._alarm(f"observe.prompts: {wrong}; the run goes on")
                self._alarmed = True
                return
            answer = done.removeprefix(prompt).rstrip("\n")
            with (run_dir / _SAMPLES).open("a") as file:
                file.write(json.dumps({"step": step, "prompt": prompt, "answer": answer}) + "\n")
            self._line(f"sample  step {step}: {prompt!r} -> {answer[:_SHOWN]!r}")


def _answered(command: list[str]) -> tuple[str, str]:
    """What a command printed, and what was wrong with it, if anything."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_ANSWER_S:g} s"
    return done.stdout, done.stderr.strip()[-300:] if done.returncode else ""
