"""A callback in the driver: report checkpoints and incidents elsewhere, and stop at a target loss.

python examples/callbacks/driver_callback.py [key=value ...]
"""

import sys
from pathlib import Path

import raytrain_hpc as rt

SETTINGS = ["run.name=driver_callback", "cluster.workers=0", "train.steps=500", "model.num_layers=2"]


class Notify(rt.DriverCallback):
    optional = True  # its exceptions are alarms, and do not end the run

    def on_metrics(self, metrics: dict) -> None:
        if metrics["train/loss"] < 4.0:
            self.control.stop()  # saves; the same command resumes

    def on_checkpoint_published(self, step: int, path: Path) -> None:
        print(f"message: checkpoint of step {step} in {path.name}")  # or a call of a chat service

    def on_incident(self, incident: dict) -> None:
        print(f"message: {incident['kind']} on rank {incident['rank']}")


if __name__ == "__main__":
    print(rt.train(rt.load_config(None, [*SETTINGS, *sys.argv[1:]]), callbacks=[Notify()], quiet=True).outcome)
