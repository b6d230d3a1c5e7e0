"""Average the weights, and compare the validation loss of the average with that of the weights.

python examples/callbacks/ema.py [key=value ...]
"""

import sys

import raytrain_hpc as rt

SETTINGS = ["cluster.workers=0", "train.steps=60", "optimizer.lr=0.02", "lr_scheduler.name=constant"]
SETTINGS += ["model.num_layers=2", "logging.sample_tokens=0"]


def main(words: list[str]) -> None:
    losses = {}
    for name, callbacks in {"trained": [], "averaged": [rt.EMA(decay=0.9)]}.items():
        config = rt.load_config(None, [*SETTINGS, *words, f"run.name=ema_{name}"])
        result = rt.train(config, callbacks=callbacks)
        losses[name] = result.val_loss
        print(f"{name}: training loss {result.train_loss:.4f}")  # equal: averaging does not change training
    print(f"validation loss {losses['trained']:.4f} of the weights, {losses['averaged']:.4f} of their average")
    for weights in ("trained", "averaged"):
        print(f"{weights}: {''.join(rt.generate(result.run_dir, 'def ', weights=weights, max_tokens=40))!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
