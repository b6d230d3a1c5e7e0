"""Measure training speed on one GPU, technique by technique: `python benchmarks/gpu_speed.py --out FILE`.

Each row runs in a process of its own, so that running out of memory ends one row only. Results are appended to FILE as
JSON lines, and rows that it has already are skipped; `--rows PATTERN` selects rows. `--against plain,transformers,
torchtitan` measures these peers after each row that they can run: with the same model, tokens and initial weights.
`--dry-run` runs every row on a CPU with a tiny model, to test this script. Needs no Ray.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARMUP_STEPS, STEPS = 6, 30
PEERS = ("plain", "transformers", "torchtitan")
LOSS_TOLERANCE = 1e-3
COMMON = (
    *("data.path=synthetic", "cluster.workers=0", "eval.samples=1", "lr_scheduler.warmup_steps=0"),
    "train.dtype=bf16",
)
LLAMA_1B = ("model.preset=llama3_1b", "train.seq_len=4096", "train.compile=true", "train.global_batch_size=16")
GPT2 = ("model.preset=gpt2_124m", "train.seq_len=1024", "train.compile=true", "train.global_batch_size=64")
BF16_RESIDUAL = "train.residual_dtype=bf16"
LONG_1B = (
    *("model.preset=llama3_1b", "train.seq_len=131072", "train.compile=true", "train.global_batch_size=1"),
    *("train.micro_batch_size=1", "train.loss_chunks=32"),
)
LLAMA_8B = ("model.preset=llama3_8b", "train.seq_len=4096", "train.compile=true", "train.global_batch_size=1")
MOE_1B = (
    *("model.hidden_size=1024", "model.num_layers=16", "model.num_heads=16", "model.ffn_size=704"),
    *("model.num_experts=64", "model.experts_per_token=8", "model.vocab_size=50304", "train.seq_len=4096"),
    *("train.compile=true", "train.global_batch_size=8", "train.micro_batch_size=4"),
)
FULL_RECOMPUTE = "parallel.activation_checkpointing=full"
TINY = (  # of a dry run, after the settings of a row
    *("model.preset=", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=auto"),
    *("model.ffn_size=64", "model.vocab_size=64", "train.seq_len=32", "train.global_batch_size=2"),
    *(
        "train.micro_batch_size=1",
        "train.dtype=fp32",
        "train.residual_dtype=fp32",
        "train.compile=false",
        "cluster.device=cpu",
    ),
)


@dataclass(frozen=True)
class Row:
    """One measurement. `target`: the least value that the project aims at, of the metric `target_metric`.

    `has_peers`: peers can train with these settings too; those of techniques that they lack would compare others.
    """

    name: str
    overrides: tuple[str, ...]
    target: float | None = None
    target_metric: str = "mfu_percent"
    has_peers: bool = False


ROWS = (
    Row("llama3_1b, microbatch 4", (*LLAMA_1B, "train.micro_batch_size=4"), has_peers=True),
    Row("llama3_1b, microbatch 8", (*LLAMA_1B, "train.micro_batch_size=8"), has_peers=True),
    Row("llama3_1b, microbatch 16", (*LLAMA_1B, "train.micro_batch_size=16"), 60.0, has_peers=True),
    Row("llama3_1b, microbatch 16, 2 loss chunks", (*LLAMA_1B, "train.micro_batch_size=16", "train.loss_chunks=2")),
    Row("llama3_1b, microbatch 16, 4 loss chunks", (*LLAMA_1B, "train.micro_batch_size=16", "train.loss_chunks=4")),
    Row("llama3_1b, microbatch 16, bf16 residual", (*LLAMA_1B, "train.micro_batch_size=16", BF16_RESIDUAL)),
    Row("llama3_1b, microbatch 8, 8 loss chunks", (*LLAMA_1B, "train.micro_batch_size=8", "train.loss_chunks=8")),
    Row("llama3_1b, eager", (*LLAMA_1B, "train.micro_batch_size=4", "train.compile=false"), has_peers=True),
    Row("llama3_1b, deterministic", (*LLAMA_1B, "train.micro_batch_size=8", "train.deterministic=true")),
    Row("llama3_1b, elastic", (*LLAMA_1B, "train.micro_batch_size=8", "train.deterministic=elastic")),
    Row("llama3_1b, documents", (*LLAMA_1B, "train.micro_batch_size=8", "data.packing=documents")),
    Row("llama3_1b, Muon", (*LLAMA_1B, "train.micro_batch_size=8", "optimizer.name=muon")),
    Row("gpt2_124m, microbatch 32", (*GPT2, "train.micro_batch_size=32"), 45.0, has_peers=True),
    Row("gpt2_124m, microbatch 64", (*GPT2, "train.micro_batch_size=64"), 45.0, has_peers=True),
    Row("llama3_8b, full recomputation", (*LLAMA_8B, "train.micro_batch_size=1", FULL_RECOMPUTE), 50.0),
    Row("8 of 64 experts", MOE_1B, 40.0),
    Row("llama3_1b, 131072 tokens", (*LONG_1B, FULL_RECOMPUTE)),
    Row("llama3_1b, 131072 tokens, offload", (*LONG_1B, FULL_RECOMPUTE, "parallel.activation_offload=cpu")),
    Row(
        "llama3_1b, 131,072 tokens",
        (*LLAMA_1B, "train.seq_len=131072", "train.global_batch_size=1", "train.loss_chunks=32", FULL_RECOMPUTE),
    ),
)


def measure(row: Row, peer: str | None, *, is_dry_run: bool) -> dict[str, Any]:
    """Train with the settings of a row, by the platform or a peer. Return medians, kernels and state of the device."""
    import torch

    from raytrain_hpc.bench.device_measurement import compute_mfu_percent, measure_peer, measure_platform
    from raytrain_hpc.config.loader import load_config
    from raytrain_hpc.config.model_spec import resolve_model_spec
    from raytrain_hpc.observability.kernel_summary import ATTENTION, COMMUNICATION, GEMM

    device = torch.device("cpu" if is_dry_run else "cuda:0")
    warmup, steps = (1, 3) if is_dry_run else (WARMUP_STEPS, WARMUP_STEPS + STEPS)
    place = f"cluster.device={device.type}"
    config = load_config(
        None, [*COMMON, place, *row.overrides, *(TINY if is_dry_run else ()), f"train.steps={steps + 1}"]
    )
    spec = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len)
    if peer is None:
        measured = measure_platform(config, device, warmup=warmup)
    else:
        measured = measure_peer(config, peer, warmup=warmup)
    kernels, rate = measured.kernels, measured.tokens_per_sec
    name = "cpu" if is_dry_run else torch.cuda.get_device_name(device)
    mfu, square = (compute_mfu_percent(config, spec, name, rate, causal=causal) for causal in (True, False))
    telemetry = {key: value for key, value in measured.telemetry.to_json().items() if value is not None}
    result: dict[str, Any] = {"row": get_name(row, peer), "device": name, "torch": torch.__version__}
    result |= {"tokens_per_sec": rate, "mfu_percent": mfu, "mfu_percent_full_square": square}
    result |= {"peak_gib": measured.peak_gib, "first_loss": measured.losses[0], "last_loss": measured.losses[-1]}
    for kind, share in (
        (GEMM, "product_share"),
        (ATTENTION, "attention_share"),
        (COMMUNICATION, "communication_share"),
    ):
        result[share] = kernels.compute_share(kind)
    result |= {"idle_share": kernels.idle_share, **telemetry}
    result["attention_kernels"] = [kernel[:80] for kernel in kernels.list_names(ATTENTION)]
    result["top_kernels"] = {
        kernel.name[:80]: round(kernel.seconds / kernels.busy_s, 4) for kernel in kernels.operations[:8]
    }
    result |= {"target": None if peer else row.target, "target_metric": row.target_metric}
    return result | {"overrides": list(row.overrides)}


def get_name(row: Row, peer: str | None) -> str:
    """Return the name of a row in the results."""
    return row.name if peer is None else f"{row.name}, by {peer}"


def read_done(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results that a file has, by row, without errors."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {result["row"]: result for result in map(json.loads, lines) if "error" not in result}


def compare_first_loss(result: dict[str, Any], platform: dict[str, Any] | None) -> dict[str, Any]:
    """Return the result of a peer, or an error if its first loss is not the platform's up to rounding in bf16."""
    if platform is None or "error" in result:
        return result
    loss, expected = result["first_loss"], platform["first_loss"]
    if abs(loss - expected) <= LOSS_TOLERANCE * expected:
        return result
    return {"row": result["row"], "error": f"another model: its first loss is {loss}, the platform's {expected}"}


def run_in_process(row: Row, peer: str | None, timeout_s: float, *, is_dry_run: bool) -> dict[str, Any]:
    """Measure a row in a new process. Return its result, or an error."""
    name = get_name(row, peer)
    command = [sys.executable, __file__, "--one", row.name, *(["--dry-run"] if is_dry_run else [])]
    command += ["--against", peer] if peer else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return {"row": name, "error": f"no result within {timeout_s:g} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"row": name, "error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def format_line(result: dict[str, Any]) -> str:
    """Return a line of the table that goes into RESULTS.md."""
    if "error" in result:
        return f"| {result['row']} | failed: {result['error']} | | | | | | |"
    mfu, square = (result[key] for key in ("mfu_percent", "mfu_percent_full_square"))
    numbers = " | ".join("-" if value is None else f"{value:.1f}" for value in (mfu, square, result["peak_gib"]))
    kernel = ", ".join(result["attention_kernels"])[:60] or "-"
    power = f"{result['power_w']:.0f} W, {result['sm_clock_mhz']:.0f} MHz" if "power_w" in result else "unknown"
    share = f"{100 * result['product_share']:.0f} %"
    return f"| {result['row']} | {result['tokens_per_sec']:.0f} | {numbers} | {share} | {kernel} | {power} |"


def main() -> None:
    """Measure the selected rows and print the table."""
    from raytrain_hpc.bench.peer_check import check_peers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="pattern of row names")
    parser.add_argument("--out", type=Path, default=Path("gpu_speed.jsonl"))
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds per row")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--against", default="", help="peers, separated by commas: plain, transformers, torchtitan")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peers = [peer for peer in arguments.against.split(",") if peer]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--against {', '.join(unknown)}: known are {', '.join(PEERS)}")
    if arguments.one:
        row = next(row for row in ROWS if row.name == arguments.one)
        print(json.dumps(measure(row, peers[0] if peers else None, is_dry_run=arguments.dry_run)))
        return
    check_peers(peer for peer in peers if peer != "plain")
    done = read_done(arguments.out)
    print("| row | tok/s | MFU % | MFU %, full square | peak GiB | products | attention | power, clock |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in ROWS:
        if not fnmatch.fnmatch(row.name, arguments.rows):
            continue
        for peer in (None, *(peers if row.has_peers else ())):
            name = get_name(row, peer)
            if name in done:
                continue
            result = run_in_process(row, peer, arguments.timeout, is_dry_run=arguments.dry_run)
            result = compare_first_loss(result, done.get(row.name)) if peer else result
            if "error" not in result:
                done[name] = result
            with arguments.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            print(format_line(result), flush=True)


if __name__ == "__main__":
    main()
