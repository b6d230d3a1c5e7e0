"""Stop when the validation loss has not improved for two evaluations.

python examples/callbacks/early_stopping.py [key=value ...]
"""

import sys

import raytrain_hpc as rt

SETTINGS = ["run.name=early_stopping", "cluster.workers=0", "train.steps=200", "optimizer.lr=1e-5"]
SETTINGS += ["eval.interval=5", "eval.samples=16", "model.num_layers=2", "logging.sample_tokens=0"]


def main(words: list[str]) -> None:
    config = rt.load_config(None, [*SETTINGS, *words])
    result = rt.train(config, callbacks=[rt.EarlyStopping(patience=2, min_delta=0.1)])
    print(f"{result.outcome} after {result.steps} of {config.train.steps} steps, validation loss {result.val_loss:.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
