"""Collect Python's garbage at fixed steps instead of at any time, which delays all ranks.

python examples/callbacks/garbage_collection.py [key=value ...]
"""

import gc
import sys

import raytrain_hpc as rt

SETTINGS = ["cluster.workers=0", "train.steps=40", "model.num_layers=2", "logging.sample_tokens=0"]


class CountCollections(rt.Callback):
    def pre_train(self) -> None:
        self.first = sum(generation["collections"] for generation in gc.get_stats())

    def post_commit(self, metrics: dict) -> None:
        count = sum(generation["collections"] for generation in gc.get_stats()) - self.first
        if self.context.step == self.context.end_step:
            self.context.log(f"garbage was collected {count} times in {self.context.step} steps")


if __name__ == "__main__":
    for name, callbacks in {"automatic": [], "fixed": [rt.GarbageCollection(interval=20)]}.items():
        config = rt.load_config(None, [*SETTINGS, *sys.argv[1:], f"run.name=garbage_{name}"])
        rt.train(config, callbacks=[*callbacks, CountCollections()])
