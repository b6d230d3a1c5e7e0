"""Keep the checkpoint with the best validation loss, besides the newest one, and sample from it.

python examples/callbacks/keep_best.py [key=value ...]
"""

import sys
from pathlib import Path

import raytrain_hpc as rt

SETTINGS = ["run.name=keep_best", "cluster.workers=0", "train.steps=30", "model.num_layers=2", "checkpoint.keep=1"]
SETTINGS += ["optimizer.lr=0.3", "lr_scheduler.name=constant", "eval.interval=5", "eval.samples=16"]


def main(words: list[str]) -> None:
    config = rt.load_config(None, [*SETTINGS, *words])
    result = rt.train(config, callbacks=[rt.KeepBest()])
    checkpoints = Path(result.run_dir) / "checkpoints"
    print("kept:", *sorted(path.name for path in checkpoints.glob("step-*")))
    print("labels:", *(checkpoints / "labels.json").read_text().split())
    print("".join(rt.generate(result.run_dir, "def ", step="best", max_tokens=60)))


if __name__ == "__main__":
    main(sys.argv[1:])
