"""Train from Python: start a run, follow its metrics, wait for its result, sample text from it.

python examples/quickstart.py [train.steps=500 key=value ...]
"""

from __future__ import annotations

import sys
import time

import raytrain_hpc as rt


def main(words: list[str]) -> None:
    config = rt.load_config(None, ["run.name=quickstart_api", "train.steps=200", *words])
    run = rt.start(config)  # returns at once; rt.train(config) blocks until the end

    shown = 0
    while run.running:
        time.sleep(0.5)
        for step in run.metrics()[shown:]:
            shown = step["step"]
            if shown % 20 == 0 or shown == config.train.steps:
                print(f"step {shown:4d}  loss {step['train/loss']:.3f}  {step['throughput/tokens_per_sec']:.0f} tok/s")

    result = run.result()  # re-raises the error that ended the run, if any
    print(
        f"{result.outcome} after {result.steps} steps in {result.wall_s:.0f} s, validation loss {result.val_loss:.3f}"
    )
    if config.data.path != "synthetic":
        print("".join(rt.generate(result.run_dir, "def ", max_tokens=120)))


if __name__ == "__main__":
    main(sys.argv[1:])
