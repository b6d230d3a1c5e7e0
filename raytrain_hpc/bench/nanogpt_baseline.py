"""nanoGPT's own training loop at its CPU recipe, from a clone of its repository, and the same job of the platform."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from raytrain_hpc.bench import nanogpt_process
from raytrain_hpc.bench.contenders import read_jsonl, scratch_dir
from raytrain_hpc.bench.interleave import TrainingProcess, launch_training
from raytrain_hpc.errors import RunFailedError

VOCAB_SIZE, NUM_TOKENS = 65, 1_000_000
# The recipe for CPUs in nanoGPT's README (`config/train_shakespeare_char.py` with its arguments), without evaluation.
ARGUMENTS = (
    *("--dataset=random", "--device=cpu", "--compile=False", "--dtype=float32", "--eval_interval=100000000"),
    *("--eval_iters=1", "--log_interval=1", "--block_size=64", "--batch_size=12", "--gradient_accumulation_steps=1"),
    *("--n_layer=4", "--n_head=4", "--n_embd=128", "--dropout=0.0", "--learning_rate=1e-3", "--min_lr=1e-4"),
    *("--beta2=0.99", "--warmup_iters=100", "--max_iters=100000000", "--lr_decay_iters=100000000"),
)
OVERRIDES = (
    *("data.path=synthetic", f"model.vocab_size={VOCAB_SIZE}", "model.num_layers=4", "model.num_heads=4"),
    *("model.hidden_size=128", "model.norm=layernorm", "model.activation=gelu_erf"),
    *("model.position_embedding=learned", "model.bias=false", "train.seq_len=64", "train.global_batch_size=12"),
    *("train.micro_batch_size=12", "optimizer.lr=1e-3", "lr_scheduler.min_lr=1e-4", "optimizer.beta2=0.99"),
    *("lr_scheduler.warmup_steps=100", "eval.samples=1", "logging.sample_tokens=0", "cluster.workers=0"),
)


def check_clone(clone: Path) -> None:
    """Raise RunFailedError if a directory has no nanoGPT."""
    for name in ("train.py", "model.py", "configurator.py"):
        if not (clone / name).is_file():
            raise RunFailedError(f"--against nanogpt={clone}: no {name} there; give a clone of nanoGPT's repository")


@contextmanager
def launch_nanogpt(clone: Path, threads: int) -> Iterator[TrainingProcess]:
    """Start `train.py` of a clone as a training process, on random tokens."""
    check_clone(clone)
    with scratch_dir() as directory:
        data, steps = directory / "data" / "random", directory / "steps.jsonl"
        data.mkdir(parents=True)
        tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, NUM_TOKENS).astype(np.uint16)
        for split in ("train", "val"):
            tokens.tofile(data / f"{split}.bin")
        (data / "meta.pkl").write_bytes(nanogpt_process.make_meta(VOCAB_SIZE))
        pids: list[int] = []
        command = [sys.executable, nanogpt_process.__file__, str(clone.absolute()), str(directory), *ARGUMENTS]
        environment = {"OMP_NUM_THREADS": str(threads)}
        with launch_training(
            "nanoGPT",
            command,
            environment,
            directory / "output",
            lambda: [line["unix"] for line in read_jsonl(steps)],
            lambda: pids,
        ) as run:
            pids.append(run.process.pid)
            yield run
            pids.clear()
