"""`bench prepare`: tokenization on all cores, compared with a loop in one process, and memory for 2 GiB of input."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np

from raytrain_hpc.bench.contenders import log_progress, scratch_dir
from raytrain_hpc.bench.corpus import write_corpus
from raytrain_hpc.bench.process_memory import measure_peak_pss
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.data.dataset.manifest import Manifest
from raytrain_hpc.data.preprocess.prepare import prepare
from raytrain_hpc.ray_private import start_local_ray

SPEED_BYTES, MEMORY_BYTES = 200 << 20, 2 << 30
VOCAB_SIZE = 8192
GOAL, MEMORY_GOAL_MIB = 0.9, 1024.0


def run(rounds: int) -> Table:
    """Measure speed in `rounds` alternating rounds, then peak memory on a small and a large input."""
    table = Table(
        f"bench prepare: BPE tokenization on {count_usable_cpus()} cores compared with one process, and memory",
        ("measure", "input MiB", "one process MB/s", "Ray Data MB/s", "ratio", "ratio each round")
        + ("peak MiB", "goal", "met"),
    )
    with scratch_dir() as directory:
        files = write_corpus(directory / "speed", SPEED_BYTES)
        tokenizer = _train_tokenizer(files[0], directory)
        _measure_speed(files, tokenizer, directory, rounds, table)
        _measure_memory("memory, BPE", directory / "speed", f"hf:{tokenizer}", table)
        shutil.rmtree(directory / "speed")
        write_corpus(directory / "large", MEMORY_BYTES)
        _measure_memory("memory, bytes", directory / "large", "byte", table)
    table.notes += [
        "input: source files of the standard library in random order, one per line of JSONL; byte-level BPE with "
        f"{VOCAB_SIZE} entries, trained on a part of the input, its own threads off",
        "one process: json.loads, encode, append the tokens to a file; Ray Data: `prepare` with checksums, shards and "
        "manifest, on a running, warmed-up Ray",
        f"goal: speed {GOAL} times the speed of one process times the number of cores; memory in MiB",
        "the memory rows run `prepare` as a command, including the start of Ray; the large input uses byte tokens, "
        "which are faster",
        "peak MiB: sum of PSS over the command and its child processes, including Ray and its object store",
    ]
    return table


def _train_tokenizer(sample: Path, directory: Path) -> Path:
    """Train the tokenizer for both sides and return the path of its tokenizer.json."""
    manifest = prepare([sample], directory / "sample", tokenizer=f"bpe:{VOCAB_SIZE}", engine="local")
    path = directory / "tokenizer.json"
    path.write_text(manifest.tokenizer["tokenizer"])
    return path


def _measure_speed(files: Sequence[Path], tokenizer: Path, directory: Path, rounds: int, table: Table) -> None:
    size = sum(path.stat().st_size for path in files)
    single_s, ray_s = [], []
    with _ray_cluster(directory):
        _run_prepare(files[:1], tokenizer, directory)
        for _ in range(rounds):
            start = time.perf_counter()
            tokens = _tokenize_in_one_process(files, tokenizer, directory / "plain")
            single_s.append(time.perf_counter() - start)
            start = time.perf_counter()
            manifest = _run_prepare(files, tokenizer, directory)
            ray_s.append(time.perf_counter() - start)
            if sum(split.tokens for split in manifest.splits.values()) != tokens:
                raise RuntimeError("both sides must produce the same number of tokens")
            log_progress(f"one process {single_s[-1]:.1f} s, Ray Data {ray_s[-1]:.1f} s")
    ratios = [single / ray for single, ray in zip(single_s, ray_s, strict=True)]
    goal = GOAL * count_usable_cpus()
    speeds = [size / 1e6 / median(seconds) for seconds in (single_s, ray_s)]
    table.add_row("speed", size / 2**20, *speeds, median(ratios), ratios, None, goal, median(ratios) >= goal)


def _tokenize_in_one_process(files: Sequence[Path], tokenizer: Path, out: Path) -> int:
    """Tokenize as a simple script would, and return the number of tokens."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    encoder.encode_special_tokens = True
    end = np.array([encoder.token_to_id("<|endoftext|>")], dtype=np.uint16)
    total = 0
    with out.open("wb") as file:
        for text in _read_texts(files):
            ids = np.array(encoder.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
            file.write(ids.tobytes() + end.tobytes())
            total += ids.size + 1
    return total


def _read_texts(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def _run_prepare(files: Sequence[Path], tokenizer: Path, directory: Path) -> Manifest:
    out = directory / "prepared"
    manifest = prepare(files, out, tokenizer=f"hf:{tokenizer}", engine="ray", workers=count_usable_cpus())
    shutil.rmtree(out)
    return manifest


@contextmanager
def _ray_cluster(directory: Path) -> Iterator[None]:
    """Start Ray with one slot per core."""
    import ray

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    start_local_ray(directory / "ray", num_cpus=count_usable_cpus(), object_store_memory=80 << 20, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


def _measure_memory(label: str, folder: Path, tokenizer: str, table: Table) -> None:
    size = sum(path.stat().st_size for path in folder.iterdir())
    out = folder.with_name("prepared")
    command = [sys.executable, "-m", "raytrain_hpc", "prepare", str(folder), "--out", str(out)]
    command += ["--engine", "ray", "--address", "local", "--tokenizer", tokenizer]
    peak, seconds = measure_peak_pss(command, {"RAY_TMPDIR": str(folder.parent)}, folder.with_name("output"))
    shutil.rmtree(out)
    log_progress(f"{label}: {size / 2**20:.0f} MiB in {seconds:.0f} s, peak {peak:.0f} MiB")
    met = peak <= MEMORY_GOAL_MIB
    table.add_row(label, size / 2**20, None, size / 1e6 / seconds, None, None, peak, MEMORY_GOAL_MIB, met)
