"""Compare every layout with one process: `python -m tests.parallel.parity` writes the table docs/parity.md.

It takes an hour on two cores, so rows that the file already has are kept: delete it to start over. With arguments, rows
whose model or layout contains one of them are printed instead: `python -m tests.parallel.parity zbv "ep 2"`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path

import torch

from tests.parallel.layout_run import GPT2, LLAMA, run_layout
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

TABLE = Path(__file__).parents[2] / "docs" / "parity.md"
STEPS = 20
LOSS_BOUND, GRADIENT_BOUND, LOSS_BOUND_FP32 = 1e-12, 1e-11, 1e-6
# Sizes that 2 and 4 do not divide: vocabulary 65, 50 channels, 15 positions, 5 layers, 5 experts. With dropout; 12
# sequences in 6 microbatches of 2, of which four data-parallel ranks get 1, 2, 1, 2.
BASE = [
    "model.vocab_size=65",
    "model.ffn_size=50",
    "model.num_layers=5",
    "model.dropout=0.1",
    "train.seq_len=15",
    "train.micro_batch_size=2",
    "optimizer.lr=3e-3",
    f"train.steps={STEPS}",
]
MODELS = {
    "GPT-2": [*GPT2, "model.tie_embeddings=true"],
    "Llama": [*LLAMA, "model.num_kv_heads=2", "model.tie_embeddings=false"],
    "MoE": [*LLAMA, "model.num_kv_heads=1", "model.num_experts=5", "model.shared_expert_size=23"],
}
AXES = {
    "dp_replicate": ["parallel.dp_replicate=2"],
    "dp_shard": ["parallel.zero=3", "parallel.dp_shard=2"],
    "tp": ["parallel.tp=2"],
    "cp": ["parallel.cp=2"],
    "pp": ["parallel.pp=2"],
    "ep": ["parallel.ep=2", "parallel.dp_replicate=2"],
}
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")


@dataclass(frozen=True)
class Layout:
    """A parallel layout: one row of the table per model."""

    name: str
    words: list[str]
    models: tuple[str, ...] = tuple(MODELS)


def list_layouts() -> Iterator[Layout]:
    """Yield the layouts of the table."""
    yield from (Layout(f"{axis} 2", words, _models_of(axis)) for axis, words in AXES.items())
    yield Layout("dp_shard 2, ZeRO-1", ["parallel.zero=1", "parallel.dp_shard=2"])
    yield Layout("dp_shard 2, ZeRO-2", ["parallel.zero=2", "parallel.dp_shard=2"])
    yield Layout("cp 2, Ulysses", ["parallel.cp=2", "parallel.ulysses=2"])
    for axis in ("dp_replicate", "tp", "cp", "pp"):
        yield Layout(f"{axis} 4", [f"parallel.{axis}=4"])
    yield Layout("dp_shard 4", ["parallel.zero=3", "parallel.dp_shard=4"])
    yield Layout("ep 4", ["parallel.ep=4", "parallel.dp_replicate=4"], ("MoE",))
    yield Layout("cp 4, Ulysses", ["parallel.cp=4", "parallel.ulysses=4"])
    yield Layout("cp 4, ring 2 x Ulysses 2", ["parallel.cp=4", "parallel.ulysses=2"])
    for first, second in combinations(AXES, 2):
        yield Layout(f"{first} 2 x {second} 2", _combine(first, second), _models_of(second))
    yield Layout("dp_replicate 2 x tp 2 x pp 2", ["parallel.dp_replicate=2", "parallel.tp=2", "parallel.pp=2"])
    yield Layout("cp 2 x tp 2 x pp 2", ["parallel.cp=2", "parallel.tp=2", "parallel.pp=2"])
    for schedule in SCHEDULES:
        pipeline = ["parallel.pp=2", f"parallel.pp_schedule={schedule}"]
        yield Layout(f"{schedule}, pp 2, ZeRO-0 x 2", [*pipeline, "parallel.dp_replicate=2"])
        yield Layout(f"{schedule}, pp 2, ZeRO-3 x 2", [*pipeline, "parallel.zero=3", "parallel.dp_shard=2"])
    yield Layout(
        "zbv, pp 2, ZeRO-3 x 2, ep 2", [*pipeline, "parallel.zero=3", "parallel.dp_shard=2", "parallel.ep=2"], ("MoE",)
    )


def _models_of(axis: str) -> tuple[str, ...]:
    return ("MoE",) if axis == "ep" else tuple(MODELS)


def _combine(first: str, second: str) -> list[str]:
    """Return the settings of two axes of size 2; ep needs 4 data-parallel and cp ranks."""
    if second != "ep":
        return [*AXES[first], *AXES[second]]
    if first in ("dp_replicate", "cp"):
        return [f"parallel.{first}=4", "parallel.ep=2"]
    if first == "dp_shard":
        return ["parallel.zero=3", "parallel.dp_shard=4", "parallel.ep=2"]
    return [*AXES[first], *AXES["ep"]]


def count_ranks(words: list[str]) -> int:
    """Return the number of ranks of a layout."""
    sizes = dict(word.removeprefix("parallel.").split("=") for word in words if word.startswith("parallel."))
    product = 1
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "pp"):
        product *= int(sizes.get(axis, 1))
    return product


@dataclass(frozen=True)
class RunResult:
    """Results of a run: metrics of each step in fp64 and fp32, and the fp64 state after the first and the last step."""

    fp64: list[dict[str, float]]
    state: dict[str, torch.Tensor]
    fp32: list[dict[str, float]]


def run_settings(pool: WarmPool, words: list[str]) -> RunResult:
    """Train on a layout in fp64 and in fp32."""
    with tempfile.TemporaryDirectory() as directory:
        fp64, state = run_layout(pool, Path(directory), *BASE, "train.dtype=fp64", *words, steps=STEPS)
    fp32 = get_step_metrics(pool.train(make_small_config(None, *BASE, *words))[0])
    return RunResult(fp64, state, fp32)


def compute_differences(result: RunResult, expected: RunResult) -> dict[str, float]:
    """Return the largest |a - b| / max(|b|, 1e-6 of the global norm), of scalars and of full tensors."""
    gradients = _compare_tensors(result, expected, "1 optimizer.exp_avg.")
    weights = _compare_tensors(result, expected, f"{STEPS} model.")
    return {
        "loss": _compare_scalars(result.fp64, expected.fp64, "train/loss"),
        "gradient": max(gradients.values()),
        "norm": _compare_scalars(result.fp64, expected.fp64, "train/grad_norm"),
        "weight": max(weights.values()),
        "loss fp32": _compare_scalars(result.fp32, expected.fp32, "train/loss"),
    }


def _compare_scalars(metrics: list[dict[str, float]], expected: list[dict[str, float]], key: str) -> float:
    if not len(metrics) == len(expected) == STEPS:
        raise RuntimeError(f"{len(metrics)} and {len(expected)} steps, not {STEPS}")
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(metrics, expected, strict=True))


def _compare_tensors(result: RunResult, expected: RunResult, prefix: str) -> dict[str, float]:
    """Return the differences by name. The first moment after step 1 is a tenth of the clipped gradient."""
    if result.state.keys() != expected.state.keys():
        raise RuntimeError("the two runs saved different tensors")
    tensors = {name: tensor for name, tensor in expected.state.items() if name.startswith(prefix)}
    floor = 1e-6 * sum(tensor.square().sum().item() for tensor in tensors.values()) ** 0.5
    return {
        name: ((result.state[name] - tensor).norm() / max(tensor.norm().item(), floor)).item()
        for name, tensor in tensors.items()
    }


def is_within_bounds(errors: dict[str, float]) -> bool:
    """Return whether the differences of a row are within the bounds."""
    return (
        errors["loss"] <= LOSS_BOUND
        and max(errors["gradient"], errors["norm"]) <= GRADIENT_BOUND
        and errors["loss fp32"] <= LOSS_BOUND_FP32
    )


HEAD = f"""# Every layout against one process

Written by `python -m tests.parallel.parity`: torch {version("torch")}, gloo on CPU, one thread per rank.

Each row trains {STEPS} steps and is compared with one process of the same settings: 5 layers of width 32, 4 heads (2
key-value heads in Llama, 1 in MoE), 50 feed-forward channels, vocabulary 65, 15 positions, dropout 0.1, AdamW, gradient
clipping, and 12 sequences per step in 6 microbatches of 2. GPT-2 and MoE tie their embeddings. MoE routes to 2 of 5
experts and has a shared one. Almost nothing divides evenly. The table shows the largest differences, as |a - b| /
max(|b|, 1e-6 of the global norm): in fp64, of the loss over all steps, of every gradient tensor at step 1 (norms and
biases included), of the gradient norm over all steps, and of every weight tensor at step {STEPS}; in fp32, of the loss.
Bounds: losses {LOSS_BOUND:g}, gradients {GRADIENT_BOUND:g}, fp32 losses {LOSS_BOUND_FP32:g}. Unless stated otherwise,
dp_shard is ZeRO-3, cp is a ring, and pipelines use 1f1b.

| model | layout | ranks | loss | gradients | norm | weights | loss, fp32 | |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def compute_rows(existing: list[str], is_wanted: Callable[[str], bool]) -> Iterator[str]:
    """Yield the wanted rows that the table does not have yet, as they are computed."""
    pool, baselines = WarmPool(timeout_s=900), {}
    for layout in list_layouts():
        for model in layout.models:
            num_ranks = count_ranks(layout.words)
            prefix = f"| {model} | {layout.name} | {num_ranks} |"
            if any(row.startswith(prefix) for row in existing) or not is_wanted(f"{model}: {layout.name}"):
                continue
            if model not in baselines:
                baselines[model] = run_settings(pool, [*MODELS[model], "cluster.workers=1"])
            result = run_settings(pool, [*MODELS[model], *layout.words, f"cluster.workers={num_ranks}"])
            errors = compute_differences(result, baselines[model])
            cells = " | ".join(f"{value:.1e}" for value in errors.values())
            yield f"{prefix} {cells} | {'' if is_within_bounds(errors) else 'FAILS'} |"
    pool.close()


def main(filters: list[str]) -> int:
    """Write or print the table. Return the number of rows that exceed a bound."""
    if filters:
        print(HEAD, flush=True)
        lines = []
        for row in compute_rows([], lambda name: any(word in name for word in filters)):
            print(row, flush=True)
            lines.append(row)
        return sum("FAILS" in row for row in lines)
    table = TABLE.read_text() if TABLE.exists() else ""
    if not table.startswith(HEAD):
        TABLE.write_text(table := HEAD + "\n")
    for row in compute_rows(table.splitlines(), lambda name: True):
        with TABLE.open("a") as file:
            file.write(row + "\n")
    return TABLE.read_text().count("FAILS")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
