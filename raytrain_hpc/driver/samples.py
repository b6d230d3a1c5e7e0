"""What the model answers while it is trained: sampled from published checkpoints, in a process beside the run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from raytrain_hpc.config import Config

_SAMPLES = "samples.jsonl"
_SHOWN = 200  # characters of an answer on the console
_NICE = 10  # the run goes first


class Sampler:
    """Asks each checkpoint the settings' prompts, unless it is still busy with one before.

    `line` prints; `alarm` is told of what goes wrong, the first time; later checkpoints are asked all the same.
    """

    def __init__(self, config: Config, line: Callable[[str], None], alarm: Callable[[str], None]):
        self._config, self._line, self._alarm = config, line, alarm
        self._thread: threading.Thread | None = None
        self._alarmed = False

    def published(self, step: int) -> None:
        """The checkpoint of this step is there. Returns at once."""
        busy = self._thread is not None and self._thread.is_alive()
        if self._config.observe.prompts and not busy:
            self._thread = threading.Thread(target=self._ask, args=(step,), name="samples", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """The run is over: the last checkpoint is asked to the end."""
        if self._thread is not None:
            self._thread.join()

    def _ask(self, step: int) -> None:
        run_dir, tokens = Path(self._config.run.dir), self._config.observe.sample_tokens
        for prompt in self._config.observe.prompts:
            words = ["--prompt", prompt, "--max-tokens", str(max(1, tokens)), "--temperature", "0", "--step", str(step)]
            command = ["nice", "-n", str(_NICE), sys.executable, "-m", "raytrain_hpc", "generate", str(run_dir), *words]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                if not self._alarmed:
                    self._alarm(f"observe.prompts: {done.stderr.strip()[-300:]}; the run goes on")
                self._alarmed = True
                return
            answer = done.stdout.removeprefix(prompt).rstrip("\n")
            with (run_dir / _SAMPLES).open("a") as file:
                file.write(json.dumps({"step": step, "prompt": prompt, "answer": answer}) + "\n")
            self._line(f"sample  step {step}: {prompt!r} -> {answer[:_SHOWN]!r}")
