"""Flipped bits on each surface of a step: which steps change, and what the comparison of replicas finds of it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from raytrain_hpc.errors import ConfigError
from raytrain_hpc.runtime.bit_flips import flip_bit
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

# Updates this small change no loss: steps are independent of each other.
FROZEN = ["optimizer.name=sgd", "optimizer.lr=1e-30", "train.deterministic=elastic", "train.micro_batch_size=6"]
LAYOUTS = {
    "dp": ["cluster.workers=2"],
    "zero3": ["cluster.workers=2", "parallel.zero=3"],
    "tp": ["cluster.workers=2", "parallel.tp=2"],
    "pp": ["cluster.workers=2", "parallel.pp=2"],
}


@pytest.mark.parametrize(
    ("dtype", "code"), [(torch.float32, "<f"), (torch.float64, "<d"), (torch.float16, "<e"), (torch.int64, "<q")]
)
def test_one_bit_of_the_first_element_is_flipped(dtype: torch.dtype, code: str) -> None:
    width = 8 * struct.calcsize(code)
    for bit in (0, 1, width // 2, width - 2, width - 1, width + 3):
        values = torch.tensor([[3.0, 5.0], [7.0, 9.0]]).to(dtype)
        flip_bit(values.t(), bit)
        number = int.from_bytes(struct.pack(code, 3), "little") ^ (1 << bit % width)
        others = b"".join(struct.pack(code, value) for value in (5, 7, 9))
        assert values.numpy().tobytes() == number.to_bytes(width // 8, "little") + others


def run_steps(pool: WarmPool, run_dir: Path | None, *words: str) -> list[tuple[float, float]]:
    """Train; return the loss and the gradient norm of each step, as rank 0 sees them."""
    records = get_step_metrics(pool.train(make_small_config(run_dir, *words))[0])
    return [(record["train/loss"], record["train/grad_norm"]) for record in records]


def make_faults(*faults: tuple[str, int], rank: int = 0, bit: int = 22, more: str = "") -> str:
    items = (f"{{kind: bitflip_{kind}, rank: {rank}, step: {step}, bit: {bit}{more}}}" for kind, step in faults)
    return f"fault.inject=[{', '.join(items)}]"


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_flipped_bit_changes_its_step_alone(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    words = [*FROZEN, *LAYOUTS[layout], "train.steps=8", "fault.replica_check_interval=0"]
    expected = run_steps(pool, None, *words)
    faults = make_faults(("activation", 3), ("gradient", 4), ("reduced", 5), ("weight", 7))
    batch = "{kind: bitflip_batch, step: 2}, "  # the lowest bit, which leads to another token of the vocabulary
    steps = run_steps(pool, tmp_path, *words, faults.replace("[", f"[{batch}"))
    is_changed = [step != clean for step, clean in zip(steps, expected, strict=True)]
    assert is_changed == [False, True, True, True, True, False, True, True]
    # The gradient of a loss, and what becomes of it, cannot change that loss.
    assert [steps[3][0], steps[4][0]] == [expected[3][0], expected[4][0]]


def test_flips_of_moments_and_updates_change_the_next_step(pool: WarmPool, tmp_path: Path) -> None:
    words = ["cluster.workers=2", "train.steps=4", "train.deterministic=elastic", "fault.replica_check_interval=0"]
    expected = run_steps(pool, None, *words)
    for kind in ("moment", "update"):
        steps = run_steps(pool, tmp_path / kind, *words, make_faults((kind, 2), bit=28))
        assert steps[:2] == expected[:2]
        assert steps[2] != expected[2]


def test_a_persistent_fault_hits_every_later_step(pool: WarmPool, tmp_path: Path) -> None:
    words = [*FROZEN, "cluster.workers=2", "train.steps=5"]
    expected = run_steps(pool, None, *words)
    for kind in ("batch", "activation", "gradient"):
        bit = 0 if kind == "batch" else 22
        faults = make_faults((kind, 3), rank=1, bit=bit, more=", persistent: true")
        steps = run_steps(pool, tmp_path / kind, *words, faults)
        is_changed = [step != clean for step, clean in zip(steps, expected, strict=True)]
        assert is_changed == [False, False, True, True, True]


@pytest.mark.parametrize("kind", ["weight", "moment", "update", "reduced"])
@pytest.mark.parametrize("bit", [4, 31])
def test_replicas_show_what_happens_after_the_reduction(pool: WarmPool, tmp_path: Path, kind: str, bit: int) -> None:
    words = ["cluster.workers=3", "train.steps=4", "fault.replica_check_interval=1"]
    with pytest.raises(RankFailedError, match="ranks 1 differ from their replicas; the other replicas agree"):
        pool.train(make_small_config(tmp_path, *words, make_faults((kind, 2), rank=1, bit=bit)))


@pytest.mark.parametrize("kind", ["batch", "activation", "gradient"])
def test_replicas_agree_on_what_was_corrupt_before_the_reduction(pool: WarmPool, tmp_path: Path, kind: str) -> None:
    words = ["cluster.workers=3", "train.steps=4", "fault.replica_check_interval=1"]
    steps = run_steps(pool, tmp_path, *words, make_faults((kind, 2), rank=1, bit=0 if kind == "batch" else 22))
    assert steps != run_steps(pool, None, *words)


def test_bits_of_other_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"fault.inject.*bit and persistent are of the kinds bitflip_\*.* kill"):
        make_small_config(None, "cluster.workers=2", "fault.inject=[{kind: kill, step: 2, persistent: true}]")
    make_small_config(None, "cluster.workers=0", "fault.inject=[{kind: bitflip_weight, step: 2}]")
