"""A ledger of 100,000 samples: each once an epoch, in one sequence, whoever reads them and however many there are."""

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
SIZES = (25_000, 25_000, 50_000)  # samples of the three sources, which last as long at their weights
STEPS = 840
WORLDS = (4, 3, 6, 1, 5)
CUTS = [0, *sorted(random.Random(7).sample(range(60, STEPS - 60), len(WORLDS) - 1)), STEPS]
SEGMENTS = [(world, range(first, stop)) for world, first, stop in zip(WORLDS, CUTS, CUTS[1:], strict=False)]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> StreamSpec:
    root = tmp_path_factory.mktemp("sources")
    paths = [write_dataset(root / str(number), number, size * T + 1) for number, size in enumerate(SIZES)]
    sources = [SourceConfig(str(path), weight) for path, weight in zip(paths, (1, 1, 2), strict=True)]
    return StreamSpec(DataConfig(sources=sources), VOCAB_SIZE, 5, T, BATCH, MICRO)


@pytest.fixture(scope="module")
def stream(recipe: StreamSpec) -> LocalStream:
    return recipe.open_stream(recipe.open_dataset())


@pytest.fixture(scope="module")
def single(stream: LocalStream) -> list[Microbatch]:
    """What one process reads."""
    read = list(stream.iter_microbatches(range(STEPS), range(V)))
    for number in range(0, len(read), 97):  # one at a time is the same
        assert same(stream.read_microbatch(*divmod(number, V)), read[number])
    return read


def shares(world: int) -> tuple[range, ...]:
    return tuple(range(r * V // world, (r + 1) * V // world) for r in range(world))


def same(one: Microbatch, other: Microbatch) -> bool:
    return all(
        getattr(one, part).tobytes() == getattr(other, part).tobytes() for part in ("samples", "inputs", "targets")
    )


def consumed(streams: list, world: int, steps: range) -> Iterator[Microbatch]:
    """The microbatches of a segment in the order of their numbers; every rank's thread reads far beyond its end."""
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                closing(
                    Prefetcher(
                        one.microbatches(range(steps.start, STEPS), share),
                        size=lambda microbatch: microbatch.nbytes,
                        max_items=50,
                        max_bytes=1 << 20,
                    )
                )
            )
            for one, share in zip(streams, shares(world), strict=True)
        ]
        for _ in steps:
            for rank, share in zip(ranks, shares(world), strict=True):
                yield from (rank.take() for _ in share)
        if steps.stop < STEPS:
            wait_until(lambda: all(rank.backlog[0] for rank in ranks))  # and is not consumed


def test_every_sample_once_an_epoch_in_the_sequence_of_one_process(stream, single) -> None:
    ledger = [one for world, steps in SEGMENTS for one in consumed([stream] * world, world, steps)]
    assert len(ledger) == len(single) == STEPS * V
    assert all(same(mine, alone) for mine, alone in zip(ledger, single, strict=True))
    samples = np.concatenate([one.samples for one in ledger])
    assert np.array_equal(samples, np.arange(STEPS * BATCH))
    first = np.concatenate([one.inputs[:, 0] for one in ledger])
    for source, size in enumerate(SIZES):
        windows = (first[first >> 24 == source] & 0xFFFFFF) // T
        epoch = windows[:size]
        assert np.array_equal(np.sort(epoch), np.arange(size)), "every sample once"
        again = windows[size:]
        assert len(np.unique(again)) == len(again) and not np.array_equal(again, epoch[: len(again)])


def find_reader_processes() -> list[int]:
    """Pids of the Ray Data readers of this process's own Ray."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                name = (entry / "cmdline").read_bytes()
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                above = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError, ValueError):
                continue
            if b"MapWorker" in name and above == os.getpid():
                found.append(int(entry.name))
    return found


def wait_until(condition, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


@pytest.mark.timeout(120)
def test_readers_on_ray_give_the_same_bytes_and_may_be_killed(ray_cluster, recipe, stream, single) -> None:
    import ray

    from raytrain_hpc.data.loader.ray_loader import Feeder, RayBlockSource

    # Two generations: the first one's readers are up and killed, those of the last one come up in the middle.
    plans = [BlockPlan(s.start, STEPS, 4, shares(world), tuple(range(world))) for world, s in SEGMENTS]
    feeders = [Feeder.remote(recipe, plan, 1, 200_000) for plan in (plans[0], plans[-1])]
    notes: list[str] = []
    try:
        position = 0
        wait_until(lambda: ray.get(feeders[0].take.remote(0, 0))[0] == "block")
        for number, ((world, steps), plan) in enumerate(zip(SEGMENTS, plans, strict=True)):
            streams = [stream] * world
            if number in (0, len(SEGMENTS) - 1):
                feeder = feeders[0 if number == 0 else 1]
                streams = [BlockStream(stream, RayBlockSource(feeder, plan, r), notes.append) for r in range(world)]
            for turn, one in enumerate(consumed(streams, world, steps)):
                assert same(one, single[position]), position
                position += 1
                if turn == 100:
                    for pid in find_reader_processes():
                        os.kill(pid, signal.SIGKILL)
            if number == 0:
                assert all(one.num_delivered for one in streams)
        assert position == len(single)
        assert not [note for note in notes if "lost" in note]
    finally:
        for feeder in feeders:
            ray.kill(feeder)
    wait_until(lambda: not find_reader_processes())


def test_seeking_is_free(stream: LocalStream, monkeypatch: pytest.MonkeyPatch) -> None:
    """A microbatch of step 10**9 takes the reads, and calls of the order, of one of step 1."""
    counts: dict[int, list[int]] = {}
    from raytrain_hpc.data.loader.sampler import Permutation

    read, permute = TokenArray.read, Permutation._network
    calls = []
    monkeypatch.setattr(TokenArray, "read", lambda self, *a: calls.append("read") or read(self, *a))
    monkeypatch.setattr(Permutation, "_network", lambda self, *a: calls.append("network") or permute(self, *a))
    for step in (1, 10**9):
        calls.clear()
        stream.read_microbatch(step, 3)
        counts[step] = [calls.count("read"), calls.count("network")]
    # One source more or less may be in a microbatch of ten samples, and a rare index takes the network once more.
    assert max(counts[10**9]) <= max(counts[1]) + 4
    assert stream.read_microbatch(10**9, 3).samples[0] == 10**9 * BATCH + 3 * MICRO
