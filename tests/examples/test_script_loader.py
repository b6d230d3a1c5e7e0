"""Loader of a script's batches: the batches of the DataLoader, split over ranks, and resumed within any epoch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from raytrain_hpc.errors import ModelError
from raytrain_hpc.script_loader import FunctionLoader, ScriptLoader


class FakeRank:
    """A rank of `world_size`, without a run."""

    def __init__(self, rank: int = 0, world_size: int = 1, *, has_started: bool = True):
        self._rank, self.world_size, self.has_started = rank, world_size, has_started

    def get_local_rows(self, num_rows: int) -> range:
        return range(self._rank * num_rows // self.world_size, (self._rank + 1) * num_rows // self.world_size)

    def move_to_device(self, batch: Any) -> Any:
        return batch

    def begin_draw(self) -> tuple[int, int]:
        return 0, 1

    @contextmanager
    def seed_rows(self, draw: tuple[int, int]) -> Iterator[Any]:
        yield lambda row: None


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> int:
        torch.rand(1)  # augmentation draws from the shared generator
        return index


class PythonShuffle(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        order = list(range(11))
        random.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return 11


def make_loader(kind: str) -> DataLoader[int]:
    options: dict[str, Any] = {
        "sequential": {},
        "shuffled": {"shuffle": True},
        "own generator": {"shuffle": True, "generator": torch.Generator().manual_seed(5)},
        "python": {"sampler": PythonShuffle()},
    }[kind]
    return DataLoader(Numbers(), batch_size=4, **options)


KINDS = ["sequential", "shuffled", "own generator", "python"]


def seed() -> None:
    torch.manual_seed(1)
    random.seed(1)


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_gets_the_batches_of_the_dataloader(kind: str) -> None:
    seed()
    loader = make_loader(kind)
    expected = [batch.tolist() for _ in range(3) for batch in loader]
    seed()
    batches = ScriptLoader(make_loader(kind), FakeRank())  # type: ignore[arg-type]
    if kind != "shuffled":  # reading rows draws between two epochs, as it does in the plain loop
        assert [next(batches).tolist() for _ in range(9)] == expected
    assert len({tuple(batch) for batch in expected}) == (3 if kind == "sequential" else 9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_used", [1, 3, 4, 8])
def test_a_resumed_loader_continues_in_any_epoch(kind: str, num_used: int) -> None:
    seed()
    first = ScriptLoader(make_loader(kind), FakeRank())  # type: ignore[arg-type]
    for _ in range(num_used):
        next(first)
    state, generators = first.state_dict(), (torch.get_rng_state(), random.getstate())
    expected = [next(first).tolist() for _ in range(9 - num_used)]
    torch.manual_seed(99)
    second = ScriptLoader(make_loader(kind), FakeRank())  # type: ignore[arg-type]
    second.load_state_dict(state)
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    assert [next(second).tolist() for _ in range(9 - num_used)] == expected


def test_ranks_split_every_batch() -> None:
    batches = []
    for rank in range(3):
        seed()
        loader = ScriptLoader(make_loader("shuffled"), FakeRank(rank, 3))  # type: ignore[arg-type]
        batches.append([next(loader).tolist() for _ in range(3)])
    seed()
    assert [sum(parts, []) for parts in zip(*batches, strict=True)] == [b.tolist() for b in make_loader("shuffled")]


def test_mistakes_are_named() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    for loader in (DataLoader(Stream()), DataLoader(Numbers(), batch_size=None)):
        with pytest.raises(ModelError, match="needs a torch DataLoader of a map-style dataset with a batch_size"):
            ScriptLoader(loader, None)
    small = ScriptLoader(DataLoader(Numbers(), batch_size=5), FakeRank(0, 2))  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="a batch of 1 samples for 2 ranks; .*drop_last=True"):
        [next(small) for _ in range(3)]


class NoisyNumbers(Numbers):
    def __getitem__(self, index: int) -> tuple[int, float]:  # type: ignore[override]
        return index, torch.rand(1).item()


@pytest.mark.parametrize("num_used", [1, 3, 4, 6])
def test_a_batch_drawn_before_the_loop_is_the_last_one_again(num_used: int) -> None:
    def make_noisy_loader(rank: FakeRank) -> ScriptLoader:
        return ScriptLoader(DataLoader(NoisyNumbers(), batch_size=4, shuffle=True), rank)  # type: ignore[arg-type]

    def draw(loader: ScriptLoader) -> list[list[float]]:
        return [values.tolist() for values in next(loader)]

    seed()
    first = make_noisy_loader(rank := FakeRank(has_started=False))
    drawn = [draw(first)]
    rank.has_started = True
    drawn += [draw(first) for _ in range(num_used - 1)]
    state, generator = first.state_dict(), torch.get_rng_state()
    expected = [draw(first) for _ in range(4)]
    torch.manual_seed(99)
    second = make_noisy_loader(rank := FakeRank(has_started=False))
    second.load_state_dict(state)
    before = torch.get_rng_state()
    assert draw(second) == drawn[-1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(generator)
    rank.has_started = True
    assert [draw(second) for _ in range(4)] == expected
    early = make_noisy_loader(FakeRank(has_started=False))
    draw(early)
    with pytest.raises(ModelError, match="at most one batch before the loop over run.steps"):
        draw(early)


def test_a_function_that_draws_ahead_draws_its_last_batch_again() -> None:
    rank = FakeRank(has_started=False)
    torch.manual_seed(0)
    first = FunctionLoader(lambda: torch.rand(1).item(), rank)  # type: ignore[arg-type]
    drawn = [next(first) for _ in range(4)]
    state, generator = first.state_dict(), torch.get_rng_state()
    expected = [next(first), next(first)]
    torch.manual_seed(8)
    second = FunctionLoader(lambda: torch.rand(1).item(), rank)  # type: ignore[arg-type]
    second.load_state_dict(state)
    assert next(second) == drawn[-1]
    torch.set_rng_state(generator)
    rank.has_started = True
    assert [next(second), next(second)] == expected
