"""Record the history of GPU allocations during two steps, to find out what fills the memory.

    python examples/callbacks/memory_snapshot.py [key=value ...]

Open the files at https://docs.pytorch.org/memory_viz. Without a GPU, nothing is recorded.
"""

import sys
from pathlib import Path

import raytrain_hpc as rt

SETTINGS = ["run.name=memory_snapshot", "cluster.workers=0", "train.steps=6", "logging.sample_tokens=0"]


def main(words: list[str]) -> None:
    config = rt.load_config(None, [*SETTINGS, *words])
    result = rt.train(config, callbacks=[rt.MemorySnapshot(steps=(2, 4))])
    paths = sorted(Path(result.run_dir).glob("memory/*.pickle"))
    print("snapshots:", *(paths or ["none, because no rank has a GPU"]))


if __name__ == "__main__":
    main(sys.argv[1:])
