"""`bench data`: both data engines compared with a bare gather, plain Ray Data over Parquet, and torch's DataLoader."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raytrain_hpc.bench.contenders import log_progress, scratch_dir
from raytrain_hpc.bench.idle_ray import idle_ray
from raytrain_hpc.bench.local_readers import BenchDataset, measure_dataloader, measure_gather, measure_local_engine
from raytrain_hpc.bench.results_table import Table
from raytrain_hpc.config.schema import DataConfig
from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, Manifest
from raytrain_hpc.data.dataset.token_shards import ShardWriter
from raytrain_hpc.data.loader.block_stream import BlockPlan
from raytrain_hpc.data.loader.stream import StreamSpec

TOKENS, SHARD_TOKENS, VOCAB = 128 << 20, 32 << 20, 50_257
SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH = 2048, 64, 16
STEPS_PER_ROUND = 768  # of 131,072 tokens, per side and round
LOCAL_TURNS_PER_ROUND = 15  # a turn takes 0.2 s; a round is the median over these turns
READERS = 2
LOCAL_GOAL, RAY_GOAL = 0.8, 2.0
DISTANT_STEP = 10**6


def run(rounds: int) -> Table:
    """Measure all readers on the same tokens, alternating, for `rounds` rounds."""
    table = Table(
        f"bench data: windows of {SEQ_LEN:,} tokens in a shuffled order, microbatches of {MICRO_BATCH}, as int64",
        ("measure", "platform", "peer", "ratio", "ratio each round", "goal", "met"),
    )
    with scratch_dir() as directory:
        dataset = _write_dataset(directory)
        platform_rates, peer_rates = [], []
        for _ in range(rounds):
            turns = [
                (measure_local_engine(dataset, STEPS_PER_ROUND), measure_gather(dataset, STEPS_PER_ROUND))
                for _ in range(LOCAL_TURNS_PER_ROUND)
            ]
            platform_rates.append(median(platform_rate for platform_rate, _ in turns))
            peer_rates.append(median(peer_rate for _, peer_rate in turns))
            log_progress(f"local engine {platform_rates[-1] / 1e6:.0f}, bare gather {peer_rates[-1] / 1e6:.0f} M tok/s")
        _add_comparison(table, "local engine; peer: bare gather, M tok/s", platform_rates, peer_rates, LOCAL_GOAL)
        with idle_ray(cpus=8):
            _measure_ray(rounds, dataset, directory / "parquet", table)
    table.notes += [
        f"{TOKENS:,} tokens of random text in uint16, in the page cache; rates are medians over the rounds",
        "bare gather: copy the same windows from a numpy.memmap, at precomputed offsets, into the same two arrays; a "
        f"round is the median of {LOCAL_TURNS_PER_ROUND} turns of both",
        f"Ray engine: {READERS} readers; another process takes microbatches in order, timed from the first block",
        "streaming_split: Parquet files of the same windows, iter_torch_batches in the same process; unordered",
        "DataLoader: 2 workers, a memory-mapped dataset of the same windows, shuffled, collated to int64",
        "first batch: time until a running consumer could train; Ray: from starting the feeder to its first block",
        "resident memory: sum of the unshared memory of consumer, feeder and readers",
    ]
    return table


def _add_comparison(
    table: Table, measure: str, platform_rates: list[float], peer_rates: list[float], goal: float
) -> None:
    ratios = [platform_rate / peer_rate for platform_rate, peer_rate in zip(platform_rates, peer_rates, strict=True)]
    rates = (median(platform_rates) / 1e6, median(peer_rates) / 1e6)
    table.add_row(measure, *rates, median(ratios), ratios, goal, median(ratios) >= goal)


def _measure_ray(rounds: int, dataset: BenchDataset, parquet: Path, table: Table) -> None:
    import ray

    from raytrain_hpc.bench.ray_data_readers import Consumer, measure_ray_engine, measure_streaming_split

    _write_parquet(dataset, parquet)
    consumer = Consumer.options(num_cpus=0).remote()  # type: ignore[attr-defined]
    ray.get(consumer.wait_until_ready.remote())
    engine, split, loader = [], [], []
    memory = 0.0
    for _ in range(rounds):
        rate, memory = measure_ray_engine(consumer, dataset, _make_block_plan(0, STEPS_PER_ROUND))
        engine.append(rate)
        split.append(measure_streaming_split(consumer, parquet, SEQ_LEN, MICRO_BATCH))
        loader.append(measure_dataloader(dataset, STEPS_PER_ROUND))
        log_progress(
            f"Ray engine {rate / 1e6:.0f}, streaming_split {split[-1] / 1e6:.0f}, DataLoader {loader[-1] / 1e6:.0f}"
        )
    _add_comparison(table, "Ray engine; peer: streaming_split, M tok/s", engine, split, RAY_GOAL)
    _add_comparison(table, "Ray engine; peer: DataLoader, M tok/s", engine, loader, RAY_GOAL)
    for step in (0, DISTANT_STEP):
        waits = [ray.get(consumer.time_local_first_batch.remote(dataset.stream_spec, step)) for _ in range(rounds)]
        table.add_row(f"first batch at step {step:,}, local engine, s", median(waits), None, None, None, None, None)
        waits = [_time_first_block(consumer, dataset, step) for _ in range(rounds)]
        table.add_row(f"first block at step {step:,}, Ray engine, s", median(waits), None, None, None, None, None)
    table.add_row("resident memory, Ray engine, MiB", memory, None, None, None, None, None)


def _time_first_block(consumer: Any, dataset: BenchDataset, step: int) -> float:
    from raytrain_hpc.bench.ray_data_readers import time_first_block

    return time_first_block(consumer, dataset, _make_block_plan(step, step + 64))


def _make_block_plan(first: int, stop: int) -> BlockPlan:
    microbatch_bytes = MICRO_BATCH * (SEQ_LEN + 1) * 2
    return BlockPlan.build(first, stop, (range(GLOBAL_BATCH // MICRO_BATCH),), (0,), microbatch_bytes)


def _write_dataset(directory: Path) -> BenchDataset:
    """Write random tokens as a dataset and also as one flat file."""
    dataset = directory / "dataset"
    dataset.mkdir()
    writer, rng = ShardWriter(dataset, "train", "uint16", SHARD_TOKENS), np.random.default_rng(0)
    with (directory / "flat").open("wb") as flat:
        for _ in range(TOKENS // SHARD_TOKENS):
            tokens = rng.integers(0, VOCAB, SHARD_TOKENS).astype(np.uint16)
            writer.append(tokens)
            flat.write(tokens.tobytes())
    manifest = Manifest({"name": "byte"}, VOCAB, "uint16", False, None, {}, (), {"train": writer.close()})
    (dataset / MANIFEST_FILE).write_text(json.dumps(manifest.to_json()))
    data = DataConfig(path=str(dataset), num_readers=READERS)
    spec = StreamSpec(data, VOCAB, 1, SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH)
    return BenchDataset(spec, directory / "flat", TOKENS)


def _write_parquet(dataset: BenchDataset, directory: Path) -> None:
    directory.mkdir()
    flat = np.memmap(dataset.flat_file, dtype=np.uint16, mode="r")
    windows = (TOKENS - 1) // SEQ_LEN
    for number in range(0, windows, 8192):
        rows_in_file = range(number, min(number + 8192, windows))
        rows = np.stack([flat[w * SEQ_LEN : (w + 1) * SEQ_LEN + 1] for w in rows_in_file])
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), SEQ_LEN + 1)
        pq.write_table(pa.table({"tokens": column}), directory / f"{number:06d}.parquet", row_group_size=512)
