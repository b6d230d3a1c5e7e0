"""Mark the parts of each step on the timeline of Nsight Systems.

    nsys profile -o steps python examples/callbacks/nvtx_ranges.py [key=value ...]

The ranges are "step N" and in it "forward_backward", "reduce" and "optimizer". Without a GPU there are none.
"""

import sys

import torch

import raytrain_hpc as rt

SETTINGS = ["run.name=nvtx_ranges", "cluster.workers=0", "train.steps=6", "logging.sample_tokens=0"]


def main(words: list[str]) -> None:
    config = rt.load_config(None, [*SETTINGS, *words])
    result = rt.train(config, callbacks=[rt.NvtxRanges()])
    ranges = "are on the timeline" if torch.cuda.is_available() else "have no ranges, because there is no GPU"
    print(f"steps 1 to {result.steps} {ranges}")


if __name__ == "__main__":
    main(sys.argv[1:])
