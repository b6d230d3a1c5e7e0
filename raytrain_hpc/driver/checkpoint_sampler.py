"""What the model answers while it is trained: sampled from published checkpoints, in a process beside the run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from raytrain_hpc.config.schema import Config

_SAMPLES_FILE = "samples.jsonl"
_MAX_PRINTED_CHARS = 200  # characters of an answer on the console
_NICENESS = 10  # the run goes first
_CLOSE_TIMEOUT_S, _PROMPT_TIMEOUT_S = 120.0, 600.0  # how long answers are waited for


class CheckpointSampler:
    """Asks checkpoints the settings' prompts, one after the other.

    `line` prints; `alarm` is told of what goes wrong, the first time; later checkpoints are asked all the same.
    """

    def __init__(self, config: Config, print_line: Callable[[str], None], alarm: Callable[[str], None]):
        self._config, self._print_line, self._alarm = config, print_line, alarm
        self._thread: threading.Thread | None = None
        self._lock, self._is_sampling = threading.Lock(), False
        self._pending_step: int | None = None  # the newest checkpoint that was not asked yet
        self._has_alarmed = False

    def on_published(self, step: int) -> None:
        """The checkpoint of this step is there. Returns at once; of those that come while one is asked, the last is."""
        if not self._config.observe.prompts:
            return
        with self._lock:
            self._pending_step = step
            if self._thread is None or not self._is_sampling:
                self._is_sampling = True
                self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """The run is over: its last checkpoint is asked to the end, for a while."""
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                step, self._pending_step = self._pending_step, None
                if step is None:
                    self._is_sampling = False
                    return
            self._sample(step)

    def _sample(self, step: int) -> None:
        run_dir, tokens = Path(self._config.run.dir), self._config.observe.sample_tokens
        for prompt in self._config.observe.prompts:
            words = ["--prompt", prompt, "--max-tokens", str(max(1, tokens)), "--temperature", "0", "--step", str(step)]
            command = [
                "nice",
                "-n",
                str(_NICENESS),
                sys.executable,
                "-m",
                "raytrain_hpc",
                "generate",
                str(run_dir),
                *words,
            ]
            done, wrong = _run_command(command)
            if wrong:
                if not self._has_alarmed:
                    self._alarm(f"observe.prompts: {wrong}; the run goes on")
                self._has_alarmed = True
                return
            answer = done.removeprefix(prompt).rstrip("\n")
            with (run_dir / _SAMPLES_FILE).open("a") as file:
                file.write(json.dumps({"step": step, "prompt": prompt, "answer": answer}) + "\n")
            self._print_line(f"sample  step {step}: {prompt!r} -> {answer[:_MAX_PRINTED_CHARS]!r}")


def _run_command(command: list[str]) -> tuple[str, str]:
    """What a command printed, and what was wrong with it, if anything."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PROMPT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PROMPT_TIMEOUT_S:g} s"
    return done.stdout, done.stderr.strip()[-300:] if done.returncode else ""
