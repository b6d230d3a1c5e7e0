"""Sample text from published checkpoints during training (logging.prompts), each prompt in a subprocess."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable

from raytrain_hpc.config.schema import Config
from raytrain_hpc.driver.run_directory import RunDirectory

_MAX_PRINTED_CHARS = 200  # of an answer, on the console
_NICE = 10  # below the run's priority
_CLOSE_TIMEOUT_S, _PROMPT_TIMEOUT_S = 120.0, 600.0  # for all pending samples at the end of the run; for one prompt


class CheckpointSampler:
    """Background thread that answers the prompts of the settings from each published checkpoint.

    `print_line` prints a line. `alarm` reports the first failure; later checkpoints are sampled nevertheless.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        print_line: Callable[[str], None],
        alarm: Callable[[str], None],
    ):
        self._config, self._directory, self._print_line, self._alarm = config, directory, print_line, alarm
        self._thread: threading.Thread | None = None
        self._lock, self._is_sampling = threading.Lock(), False
        self._pending_step: int | None = None  # the newest checkpoint that has not been sampled
        self._has_alarmed = False

    def on_published(self, step: int) -> None:
        """Request samples from the checkpoint of `step`; return at once.

        Of several checkpoints published while another is sampled, only the newest is sampled.
        """
        if not self._config.logging.prompts:
            return
        with self._lock:
            self._pending_step = step
            if self._thread is None or not self._is_sampling or not self._thread.is_alive():
                self._is_sampling = True
                self._thread = threading.Thread(target=self._run, name="samples", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait for pending samples, at most 120 s. Call after the last checkpoint has been published."""
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        while True:
            with self._lock:
                step, self._pending_step = self._pending_step, None
                if step is None:
                    self._is_sampling = False
                    return
            try:
                self._sample(step)
            except OSError as error:  # later checkpoints are sampled nevertheless
                self._report(f"{error.filename or 'samples.jsonl'}: {error.strerror or error}")

    def _report(self, reason: str) -> None:
        """Report the first failure as an alarm."""
        if not self._has_alarmed:
            self._alarm(f"logging.prompts: {reason}; training continues")
        self._has_alarmed = True

    def _sample(self, step: int) -> None:
        run_dir, tokens = self._config.run.dir, self._config.logging.sample_tokens
        for prompt in self._config.logging.prompts:
            args = ["--prompt", prompt, "--max-tokens", str(max(1, tokens)), "--temperature", "0", "--step", str(step)]
            command = ["nice", "-n", str(_NICE), sys.executable, "-m", "raytrain_hpc", "generate", run_dir, *args]
            output, error = _run_command(command)
            if error:
                self._report(error)
                return
            answer = output.removeprefix(prompt).rstrip("\n")
            self._directory.append_sample(step, prompt, answer)
            self._print_line(f"sample  step {step}: {prompt!r} -> {answer[:_MAX_PRINTED_CHARS]!r}")


def _run_command(command: list[str]) -> tuple[str, str]:
    """Run a command, and return its output and an error message, which is empty on success."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_PROMPT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {_PROMPT_TIMEOUT_S:g} s"
    return result.stdout, result.stderr.strip()[-300:] if result.returncode else ""
