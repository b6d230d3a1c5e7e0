"""What is saved of a run, compared with the state in the memory of its workers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raytrain_hpc.checkpoint.store import CheckpointStore
from raytrain_hpc.driver import saved_state
from raytrain_hpc.driver.saved_state import SavedState
from raytrain_hpc.errors import CheckpointCorruptedError
from tests.checkpoint.conftest import FakeRanks


@pytest.mark.parametrize("state", ["valid", "not trusted", "truncated", "damaged"])
def test_memory_is_outdated_by_a_checkpoint_that_the_run_can_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """After a save to regroup, memory is discarded only if a newer checkpoint can take its place."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20):
        FakeRanks.publish(store, step)
    file = store.get_path(20) / "rank-00000.safetensors"
    if state == "not trusted":
        store.distrust(10, 1, "rank 1, corrupt")
    elif state == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif state == "damaged":
        store.find_newest_valid(lambda path, reason: None, check=find_damage_in_step_20)
    monkeypatch.setattr(saved_state, "find_memory_step", lambda workers: workers)
    recorder: Any = SimpleNamespace(wait_for_checkpoints=lambda: None)
    unused: Any = None
    saved = SavedState(unused, store, None, unused, recorder, unused)
    steps: list[Any] = [8, 15, 20, None]
    assert [saved.is_memory_outdated(step) for step in steps] == [True, state == "valid", False, False]


def find_damage_in_step_20(path: Path) -> Any:
    """Find damage in the checkpoint of step 20, as a reader of its blocks does."""
    if path.name.endswith("20"):
        raise CheckpointCorruptedError("the block at byte 0 does not match")
    return SimpleNamespace(step=10, generation=1)
