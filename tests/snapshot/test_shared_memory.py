"""Snapshots that a node's processes share: whole when their process is gone, and never half of one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from raytrain_hpc.snapshot.memory_store import Snapshots
from raytrain_hpc.snapshot.shared_memory import OpenedSteps, Opening, shared_steps
from raytrain_hpc.state.sharded_state import Held, Holding

# Takes steps 1 to 4, and is half through the block of step 5 when it says so.
DYING = """
import json, sys, time
import torch
from raytrain_hpc.snapshot.shared_memory import shared_steps
from raytrain_hpc.snapshot.memory_store import Snapshots
from tests.snapshot.test_shared_memory import state

own, openings = shared_steps()
memory = Snapshots()
memory.begin(1, own)
for step in range(1, 5):
    memory.take(step, state(step))
slot = own.vacate()
slot.aside.block[: len(slot.aside.block) // 2] = 255
print(json.dumps(openings), flush=True)
time.sleep(60)
"""


def state(step: int) -> Holding:
    """Of several types, one of them of odd size, one empty."""
    return Holding(
        [
            Held.of("w", torch.full((7, 5), float(step), dtype=torch.float64)),
            Held.of("b", torch.arange(3, dtype=torch.bfloat16) + step),
            Held.of("none", torch.empty(0, 4)),
            Held.of("n", torch.tensor(step)),
        ]
    )


def equal(one: Holding, other: Holding) -> bool:
    return one.index() == other.index() and all(torch.equal(held.tensor, other.at(held.name, 0).tensor) for held in one)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_process_had_whole_is_there(number: signal.Signals) -> None:
    child = subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        openings = [Opening(*one) for one in json.loads(child.stdout.readline())]
        opened = OpenedSteps(openings, state(0).index())
        os.kill(child.pid, number)
        if number == signal.SIGKILL:
            child.wait(10)
        assert opened.steps == (4,), "the third was given up for the fifth, of which half is there"
        assert equal(opened.at(4), state(4)) and not opened.at(3) and not opened.at(5)
    finally:
        child.kill()
        child.wait(10)
    assert equal(opened.at(4), state(4))


def test_its_steps_are_seen_as_they_come_and_go() -> None:
    own, openings = shared_steps()
    memory, buddy = Snapshots(), Snapshots()
    memory.begin(3, own)
    buddy.begin(3, None, {1: OpenedSteps(openings, state(0).index())})
    assert buddy.copies == {1: ()} and not buddy.at(1)
    for step in range(1, 6):
        memory.take(step, state(step))
        assert buddy.copies == {1: memory.steps} == {1: tuple(range(max(1, step - 1), step + 1))}
    seen = buddy.at(5)
    seen.at("w", 0).tensor.zero_()
    assert equal(memory.at(5), state(5)), "what one does with it is its own"
    memory.begin(4)
    assert buddy.copies == {1: (4, 5)} and equal(buddy.at(4), state(4)), "until the buddy begins anew"
    buddy.begin(4)
    assert buddy.copies == {}


def test_a_rank_that_holds_nothing_has_steps_all_the_same() -> None:
    nothing = Holding([Held.of("w", torch.empty(0, 3))])
    own, openings = shared_steps()
    memory, opened = Snapshots(), OpenedSteps(openings, nothing.index())
    memory.begin(1, own)
    memory.take(8, nothing)
    assert opened.steps == (8,) and equal(opened.at(8), nothing)


def test_another_file_of_that_name_is_not_taken_for_it() -> None:
    _, (first, second) = shared_steps()
    with pytest.raises(FileNotFoundError, match="another machine or container"):
        OpenedSteps([Opening(first.path, second.link)], state(0).index())
    with pytest.raises(OSError):
        OpenedSteps([Opening("/proc/self/fd/987654", first.link)], state(0).index())


def test_nothing_stays_open() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for generation in range(3):
        own, openings = shared_steps()
        memory, buddy = Snapshots(), Snapshots()
        memory.begin(generation, own)
        memory.take(1, state(1))
        buddy.begin(generation, None, {0: OpenedSteps(openings, state(0).index())})
        assert equal(buddy.at(1), state(1)) and count() > before
        del own, memory, buddy
        assert count() == before
