"""A callback with state: a moving average of the gradient norm, which survives faults and restarts.

python examples/callbacks/stateful_callback.py [key=value ...]
"""

import sys

import raytrain_hpc as rt

WORDS = ["run.name=stateful_callback", "cluster.workers=0", "model.num_layers=2", *sys.argv[1:]]


class AverageNorm(rt.Callback):
    average = 0.0

    def post_step(self, metrics: dict) -> None:
        self.average += 0.1 * (metrics["train/grad_norm"] - self.average)
        metrics["train/average_norm"] = self.average  # in metrics.jsonl

    def state_dict(self) -> dict:
        return {"average": self.average}

    def load_state_dict(self, state: dict) -> None:
        self.average = state["average"]


if __name__ == "__main__":
    for steps in (10, 20):  # the second call resumes the run, and with it the average
        run = rt.start(rt.load_config(None, [*WORDS, f"train.steps={steps}"]), callbacks=[AverageNorm()])
        print(f"step {run.result().steps}: average norm {run.metrics()[-1]['train/average_norm']:.6f}")
