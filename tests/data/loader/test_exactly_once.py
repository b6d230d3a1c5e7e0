"""Ledger of 100,000 samples: each is read once per epoch, in one sequence, for any number and kind of readers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from raytrain_hpc.config.schema import DataConfig, SourceConfig
from raytrain_hpc.data.dataset.token_shards import TokenArray
from raytrain_hpc.data.loader.block_stream import BlockPlan, BlockStream
from raytrain_hpc.data.loader.prefetch import Prefetcher
from raytrain_hpc.data.loader.stream import LocalStream, Microbatch, StreamSpec
from tests.data.position_tokens import VOCAB_SIZE, write_dataset

T, BATCH, MICRO = 4, 120, 10
V = BATCH // MICRO
SIZES = (25_000, 25_000, 50_000)  # samples of the three sources; at their weights, all epochs end together
STEPS = 840
WORLDS = (4, 3, 6, 1, 5)
SEGMENT_BOUNDS = [0, *sorted(random.Random(7).sample(range(60, STEPS - 60), len(WORLDS) - 1)), STEPS]
SEGMENTS = [
    (world, range(first, stop)) for world, first, stop in zip(WORLDS, SEGMENT_BOUNDS, SEGMENT_BOUNDS[1:], strict=False)
]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> StreamSpec:
    root = tmp_path_factory.mktemp("sources")
    paths = [write_dataset(root / str(number), number, size * T + 1) for number, size in enumerate(SIZES)]
    sources = [SourceConfig(str(path), weight) for path, weight in zip(paths, (1, 1, 2), strict=True)]
    return StreamSpec(DataConfig(sources=sources), VOCAB_SIZE, 5, T, BATCH, MICRO)


@pytest.fixture(scope="module")
def stream(spec: StreamSpec) -> LocalStream:
    return spec.open_stream(spec.open_dataset())


@pytest.fixture(scope="module")
def reference(stream: LocalStream) -> list[Microbatch]:
    """Microbatches read by one process."""
    microbatches = list(stream.iter_microbatches(range(STEPS), range(V)))
    for number in range(0, len(microbatches), 97):  # single reads give the same
        assert have_equal_content(stream.read_microbatch(*divmod(number, V)), microbatches[number])
    return microbatches


def split_microbatches(world: int) -> tuple[range, ...]:
    return tuple(range(r * V // world, (r + 1) * V // world) for r in range(world))


def have_equal_content(first: Microbatch, second: Microbatch) -> bool:
    return all(
        getattr(first, name).tobytes() == getattr(second, name).tobytes() for name in ("samples", "inputs", "targets")
    )


def iter_segment(streams: list, world: int, steps: range) -> Iterator[Microbatch]:
    """Yield the microbatches of a segment in order; the prefetch thread of each rank reads far beyond its end."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                closing(
                    Prefetcher(
                        stream.iter_microbatches(range(steps.start, STEPS), microbatches),
                        size=lambda microbatch: microbatch.nbytes,
                        max_items=50,
                        max_bytes=1 << 20,
                    )
                )
            )
            for stream, microbatches in zip(streams, split_microbatches(world), strict=True)
        ]
        for _ in steps:
            for rank, microbatches in zip(ranks, split_microbatches(world), strict=True):
                yield from (rank.take() for _ in microbatches)
        if steps.stop < STEPS:
            wait_until(lambda: all(rank.backlog[0] for rank in ranks))  # prefetched, not consumed


def test_every_sample_is_read_once_per_epoch_in_the_order_of_one_process(stream, reference) -> None:
    ledger = [microbatch for world, steps in SEGMENTS for microbatch in iter_segment([stream] * world, world, steps)]
    assert len(ledger) == len(reference) == STEPS * V
    assert all(have_equal_content(actual, expected) for actual, expected in zip(ledger, reference, strict=True))
    samples = np.concatenate([microbatch.samples for microbatch in ledger])
    assert np.array_equal(samples, np.arange(STEPS * BATCH))
    first_tokens = np.concatenate([microbatch.inputs[:, 0] for microbatch in ledger])
    for source, size in enumerate(SIZES):
        windows = (first_tokens[first_tokens >> 24 == source] & 0xFFFFFF) // T
        epoch = windows[:size]
        assert np.array_equal(np.sort(epoch), np.arange(size)), "every sample once"
        next_epoch = windows[size:]
        assert len(np.unique(next_epoch)) == len(next_epoch) and not np.array_equal(
            next_epoch, epoch[: len(next_epoch)]
        )


def find_reader_processes() -> list[int]:
    """Return the pids of the Ray Data readers of the Ray instance of this process."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if b"MapWorker" in name and grandparent == os.getpid():
                pids.append(int(entry.name))
    return pids


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_ray_readers_give_the_same_bytes_even_if_killed(ray_cluster, spec, stream, reference) -> None:
    import ray

    from raytrain_hpc.data.loader.ray_loader import Feeder, RayBlockSource

    # Two generations: readers of the first are ready and get killed, those of the last become ready midway.
    plans = [BlockPlan(s.start, STEPS, 4, split_microbatches(world), tuple(range(world))) for world, s in SEGMENTS]
    feeders = [Feeder.remote(spec, plan, 1, 200_000) for plan in (plans[0], plans[-1])]
    notes: list[str] = []
    try:
        position = 0
        wait_until(lambda: ray.get(feeders[0].take.remote(0, 0))[0] == "block")
        for number, ((world, steps), plan) in enumerate(zip(SEGMENTS, plans, strict=True)):
            streams = [stream] * world
            if number in (0, len(SEGMENTS) - 1):
                feeder = feeders[0 if number == 0 else 1]
                streams = [BlockStream(stream, RayBlockSource(feeder, plan, r), notes.append) for r in range(world)]
            for index, microbatch in enumerate(iter_segment(streams, world, steps)):
                assert have_equal_content(microbatch, reference[position]), position
                position += 1
                if index == 100:
                    for pid in find_reader_processes():
                        os.kill(pid, signal.SIGKILL)
            if number == 0:
                assert all(stream.num_delivered for stream in streams)
        assert position == len(reference)
        assert not [note for note in notes if "lost" in note]
    finally:
        for feeder in feeders:
            ray.kill(feeder)
    wait_until(lambda: not find_reader_processes())


def test_seeking_to_a_far_step_costs_no_extra_reads(stream: LocalStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a microbatch of step 10**9 takes as many reads and permutation calls as one of step 1."""
    counts: dict[int, list[int]] = {}
    from raytrain_hpc.data.loader.sampler import Permutation

    read, permute = TokenArray.read, Permutation._apply_network
    calls = []
    monkeypatch.setattr(TokenArray, "read", lambda self, *a: calls.append("read") or read(self, *a))
    monkeypatch.setattr(Permutation, "_apply_network", lambda self, *a: calls.append("network") or permute(self, *a))
    for step in (1, 10**9):
        calls.clear()
        stream.read_microbatch(step, 3)
        counts[step] = [calls.count("read"), calls.count("network")]
    # Microbatches differ in their number of sources, and some indexes take the network once more.
    assert max(counts[10**9]) <= max(counts[1]) + 4
    assert stream.read_microbatch(10**9, 3).samples[0] == 10**9 * BATCH + 3 * MICRO
