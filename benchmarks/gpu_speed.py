"""Measure training speed on one GPU, technique by technique: `python benchmarks/gpu_speed.py --out FILE`.

Each row runs in a process of its own, so that running out of memory ends one row only. Results are appended to FILE as
JSON lines, and rows that it has already are skipped; `--rows PATTERN` selects rows, several patterns separated by `|`.
`--against plain,transformers,torchtitan` measures these peers after each row that they can run: with the same model,
tokens and initial weights. `--compile-only JOBS` measures nothing, and fills the compiler's cache instead: by a step of
each row with two layers, JOBS rows at a time, since layers share compiled code, and by a few steps of each peer.
`--dry-run` runs every row on a CPU with a tiny model, to test this script. Needs no Ray.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raytrain_hpc.bench.corpus import write_token_documents
from raytrain_hpc.bench.peer_check import check_peers
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import Config

WARMUP_STEPS, STEPS = 3, 12
PEERS = ("plain", "transformers", "torchtitan")
LOSS_TOLERANCE = 1e-3
COMMON = (
    *("data.path=synthetic", "cluster.workers=0", "eval.samples=1", "lr_scheduler.warmup_steps=0"),
    *("train.dtype=bf16", "cluster.cpu_threads=8"),
)
LLAMA_1B = ("model.preset=llama3_1b", "train.seq_len=4096", "train.compile=true", "train.global_batch_size=16")
GPT2 = ("model.preset=gpt2_124m", "train.seq_len=1024", "train.compile=true", "train.global_batch_size=128")
BF16_RESIDUAL, CHUNKS = "train.residual_dtype=bf16", "train.loss_chunks=4"
BEST_1B = (*LLAMA_1B, "train.global_batch_size=32", "train.micro_batch_size=16", CHUNKS, BF16_RESIDUAL)
LONG_1B = (
    *("model.preset=llama3_1b", "train.seq_len=131072", "train.compile=true", "train.global_batch_size=1"),
    *("train.micro_batch_size=1", "train.loss_chunks=32", BF16_RESIDUAL),
)
LLAMA_8B = (
    *("model.preset=llama3_8b", "train.seq_len=4096", "train.compile=true", "train.global_batch_size=8"),
    *("train.micro_batch_size=1", CHUNKS, BF16_RESIDUAL),
)
MOE_1B = (
    *("model.hidden_size=2048", "model.num_layers=12", "model.num_heads=16", "model.ffn_size=1024"),
    *("model.num_experts=64", "model.experts_per_token=8", "model.vocab_size=50304", "train.seq_len=4096"),
    *("train.compile=true", "train.global_batch_size=24", "train.micro_batch_size=6", CHUNKS, BF16_RESIDUAL),
)
CASTS = "train.weight_copies=false"
FLOAT8_HEAD = ("train.dtype=float8", "train.float8_head=true")
FULL_RECOMPUTE = "parallel.activation_checkpointing=full"
SHALLOW = ("model.num_layers=2", "cluster.cpu_threads=2")  # of a row whose code is compiled ahead
TINY = (  # of a dry run, after the settings of a row
    *("model.preset=", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=auto"),
    *("model.ffn_size=64", "model.vocab_size=64", "train.seq_len=32", "train.global_batch_size=2"),
    *(
        "train.micro_batch_size=1",
        "train.dtype=fp32",
        "train.residual_dtype=fp32",
        "train.weight_copies=auto",
        "train.float8_head=false",
        "train.compile=false",
        "cluster.device=cpu",
    ),
)


@dataclass(frozen=True)
class Row:
    """One measurement. `target`: the least value that the project aims at, of the metric `target_metric`.

    `has_peers`: peers can train with these settings too; those of techniques that they lack would compare others.
    `steps`: measured after those of the warm-up.
    """

    name: str
    overrides: tuple[str, ...]
    target: float | None = None
    target_metric: str = "mfu_percent"
    has_peers: bool = False
    steps: int = STEPS


ROWS = (
    Row("llama3_1b, microbatch 4", (*LLAMA_1B, "train.micro_batch_size=4"), has_peers=True),
    Row("llama3_1b, microbatch 4, casts", (*LLAMA_1B, "train.micro_batch_size=4", CASTS)),
    Row("llama3_1b, microbatch 8", (*LLAMA_1B, "train.micro_batch_size=8"), has_peers=True),
    Row("llama3_1b, microbatch 16, loss chunks", (*LLAMA_1B, "train.micro_batch_size=16", CHUNKS)),
    Row("llama3_1b, and bf16 residual", BEST_1B, 60.0),
    Row("llama3_1b, and float8", (*BEST_1B, "train.dtype=float8")),
    Row("llama3_1b, and float8 head", (*BEST_1B, *FLOAT8_HEAD), 85000.0, "tokens_per_sec"),
    Row("llama3_1b, eager", (*LLAMA_1B, "train.micro_batch_size=4", "train.compile=false"), has_peers=True),
    Row("llama3_1b, deterministic", (*LLAMA_1B, "train.micro_batch_size=4", "train.deterministic=true")),
    Row("llama3_1b, elastic", (*LLAMA_1B, "train.micro_batch_size=4", "train.deterministic=elastic")),
    Row("llama3_1b, documents", (*BEST_1B, "data.packing=documents")),
    Row("llama3_1b, Muon", (*LLAMA_1B, "train.micro_batch_size=8", "optimizer.name=muon")),
    Row("gpt2_124m, microbatch 128", (*GPT2, "train.micro_batch_size=128"), 45.0, has_peers=True),
    Row("gpt2_124m, and loss chunks", (*GPT2, "train.micro_batch_size=128", CHUNKS), 45.0),
    Row("gpt2_124m, and bf16 residual", (*GPT2, "train.micro_batch_size=128", CHUNKS, BF16_RESIDUAL), 45.0),
    Row("llama3_8b, full recomputation", (*LLAMA_8B, FULL_RECOMPUTE), 50.0),
    Row("8 of 64 experts", MOE_1B, 40.0),
    Row("8 of 64 experts, casts", (*MOE_1B, CASTS)),
    Row("llama3_1b, 131072 tokens", (*LONG_1B, FULL_RECOMPUTE), steps=3),
    Row("llama3_1b, 131072 tokens, offload", (*LONG_1B, FULL_RECOMPUTE, "parallel.activation_offload=cpu"), steps=3),
)


def build_config(row: Row, steps: int, directory: Path, *, is_dry_run: bool) -> Config:
    """Return the configuration of a row. Writes the documents that it trains on to `directory`, if it does."""
    place = f"cluster.device={'cpu' if is_dry_run else 'cuda'}"
    overrides = [*COMMON, place, *row.overrides, *(TINY if is_dry_run else ()), f"train.steps={steps + 1}"]
    config = load_config(None, overrides)
    if config.data.packing != "documents":
        return config
    vocab_size = resolve_model_spec(config.model, vocab_size=None, seq_len=config.train.seq_len).vocab_size
    num_tokens = config.train.global_batch_size * config.train.seq_len * (steps + 2)
    write_token_documents(directory / "documents", num_tokens, vocab_size, config.train.seq_len // 4)
    return load_config(None, [*overrides, f"data.path={directory / 'documents'}"])


def measure(row: Row, peer: str | None, directory: Path, *, is_dry_run: bool) -> dict[str, Any]:
    """Train with the settings of a row, by the platform or a peer. Return medians, kernels and state of the device."""
    import torch

    from raytrain_hpc.bench.device_measurement import compute_mfu_percent, measure_peer, measure_platform
    from raytrain_hpc.observability.kernel_summary import ATTENTION, COMMUNICATION, GEMM

    device = torch.device("cpu" if is_dry_run else "cuda:0")
    warmup, steps = (1, 3) if is_dry_run else (WARMUP_STEPS, WARMUP_STEPS + row.steps)
    config = build_config(row, steps, directory, is_dry_run=is_dry_run)
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
    result |= {"idle_share": kernels.idle_share, "busy_s": kernels.busy_s, **telemetry}
    result["attention_kernels"] = [kernel[:80] for kernel in kernels.list_names(ATTENTION)]
    result["top_kernels"] = [
        [round(kernel.seconds / kernels.busy_s, 4), kernel.calls, kernel.name[:120]]
        for kernel in kernels.operations[:24]
    ]
    result |= {"target": None if peer else row.target, "target_metric": row.target_metric}
    return result | {"overrides": list(row.overrides)}


def compile_row(row: Row, peer: str | None, directory: Path, *, is_dry_run: bool) -> dict[str, Any]:
    """Train one step of a row with two layers, which fills the compiler's cache. Peers need all layers, and two steps.

    A peer that compiles its model as a whole has other code for another number of layers.
    """
    import torch

    from raytrain_hpc.bench.device_measurement import measure_peer
    from raytrain_hpc.bench.local_trainer import open_trainer

    if peer is not None:
        measured = measure_peer(build_config(row, 3, directory, is_dry_run=is_dry_run), peer, warmup=1)
        return {"row": get_name(row, peer), "compiled": True, "loss": measured.losses[0]}
    shallow = replace(row, overrides=(*row.overrides, *SHALLOW))
    config = build_config(shallow, 1, directory, is_dry_run=is_dry_run)
    with open_trainer(config, torch.device("cpu" if is_dry_run else "cuda:0")) as trainer:
        return {"row": row.name, "compiled": True, "loss": trainer.train_step(0).loss}


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


def run_in_process(row: Row, peer: str | None, timeout_s: float, log: Path, *options: str) -> dict[str, Any]:
    """Measure a row in a new process. Return its result, or an error, of which `log` gets all lines."""
    name = get_name(row, peer)
    command = [sys.executable, __file__, "--one", row.name, *options]
    command += ["--against", peer] if peer else []
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the process of a peer, which would keep the GPU
            return {"row": name, "error": f"no result within {timeout_s:g} s"}
    lines = output.splitlines()
    if process.returncode or not lines:
        with log.open("a") as file:
            file.write(f"# {name}\n{errors}\n")
        return {"row": name, "error": (errors.strip().splitlines() or ["no output"])[-1][:300]}
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


def compile_rows(
    rows: Sequence[Row], peers: Sequence[str], jobs: int, timeout_s: float, log: Path, *options: str
) -> None:
    """Fill the compiler's cache with the code of rows and their peers, `jobs` at a time. Print those that fail."""
    sides = [(row, peer) for row in rows for peer in (None, *(peers if row.has_peers else ()))]
    with ThreadPoolExecutor(jobs) as executor:
        runs = [executor.submit(run_in_process, *side, timeout_s, log, *options, "--shallow") for side in sides]
        for result in (run.result() for run in runs):
            if "error" in result:
                print(f"{result['row']}, compiled ahead: {result['error']}", flush=True)


def run_one(arguments: argparse.Namespace, peer: str | None) -> None:
    """Measure or compile one row in this process, and print its result as JSON."""
    row = next(row for row in ROWS if row.name == arguments.one)
    with tempfile.TemporaryDirectory() as directory:
        if arguments.shallow:
            result = compile_row(row, peer, Path(directory), is_dry_run=arguments.dry_run)
        else:
            result = measure(row, peer, Path(directory), is_dry_run=arguments.dry_run)
    print(json.dumps(result))


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return the arguments of the command line, and the peers among them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="patterns of row names, separated by |")
    parser.add_argument("--out", type=Path, default=Path("gpu_speed.jsonl"))
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds per row")
    parser.add_argument("--compile-only", type=int, default=0, metavar="JOBS")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--against", default="", help="peers, separated by commas: plain, transformers, torchtitan")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--shallow", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    peers = [peer for peer in arguments.against.split(",") if peer]
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--against {', '.join(unknown)}: known are {', '.join(PEERS)}")
    return arguments, peers


def main() -> None:
    """Measure the selected rows and print the table."""
    arguments, peers = parse_arguments()
    if arguments.one:
        run_one(arguments, peers[0] if peers else None)
        return
    check_peers(peer for peer in peers if peer != "plain")
    done, log = read_done(arguments.out), arguments.out.with_suffix(".log")
    options = ["--dry-run"] if arguments.dry_run else []
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row.name, part) for part in arguments.rows.split("|"))]
    if arguments.compile_only:
        compile_rows(rows, peers, arguments.compile_only, arguments.timeout, log, *options)
        return
    print("| row | tok/s | MFU % | MFU %, full square | peak GiB | products | attention | power, clock |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        for peer in (None, *(peers if row.has_peers else ())):
            name = get_name(row, peer)
            if name in done:
                continue
            result = run_in_process(row, peer, arguments.timeout, log, *options)
            result = compare_first_loss(result, done.get(row.name)) if peer else result
            if "error" not in result:
                done[name] = result
            with arguments.out.open("a") as out:
                out.write(json.dumps(result) + "\n")
            print(format_line(result), flush=True)


if __name__ == "__main__":
    main()
