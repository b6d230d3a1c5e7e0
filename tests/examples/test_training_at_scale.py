"""The training-at-scale exercise: its real plan, and its measurements with small models and few steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import raytrain_hpc as rt
from examples import training_at_scale as scale

TINY = ["model.hidden_size=32", "model.num_heads=4", "model.num_layers=4", "train.seq_len=16"]
STEPS = 5


def test_fits_prints_device_memory_without_loading_torch(tmp_path: Path) -> None:
    code = "import sys; from examples.training_at_scale import main; main(['fits']); assert 'torch' not in sys.modules"
    root = Path(scale.__file__).parents[1]
    process = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(root)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert process.returncode == 0, process.stderr
    assert "Activations are not counted" in process.stdout
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in process.stdout.splitlines() if "|" in line]
    fits = {(int(dp), int(tp), int(zero)): last for _, dp, tp, zero, *_, last in cells[2:]}
    assert len(fits) == len(scale.CANDIDATES)
    assert {fits[dp, 1, 0] for dp in (1, 8, 64)} == {"no"}
    assert {last for (_, tp, zero), last in fits.items() if tp > 1 and zero} == {"yes"}
    assert list(tmp_path.iterdir()) == []


def test_fits_follows_the_closed_form_of_zero() -> None:
    state = {(row["tp"], row["ZeRO"], row["ranks"]): float(row["state GiB / rank"]) for row in scale.fits([])}
    unsharded = state[1, 0, 8]
    # Of 16 bytes per parameter, ZeRO-1 shards 8, ZeRO-2 12 and ZeRO-3 all; 1 and 2 also keep a shard of the weights.
    expected = {1: (8 + 12 / 8) / 16, 2: (4 + 16 / 8) / 16, 3: 1 / 8}
    assert {stage: state[1, stage, 8] / unsharded for stage in expected} == pytest.approx(expected, rel=1e-6)


def test_tensor_parallel_covers_every_degree_and_depth(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    configs: list[rt.Config] = []

    def measure(overrides: Sequence[str], run_dir: Path, steps: int) -> list[float]:
        configs.append(rt.load_config(None, list(overrides)))
        return [0.25 * configs[-1].parallel.tp] * 3

    monkeypatch.setattr(scale, "measure", measure)
    rows = scale.tensor_parallel([], tmp_path, STEPS)
    grid = [(layers, tp) for layers in (8, 4, 2) for tp in (1, 2, 4)]
    assert [(row["layers"], row["tp"]) for row in rows] == grid
    assert [(config.model.num_layers, config.parallel.tp) for config in configs] == grid
    assert [config.cluster.workers for config in configs] == [tp for _, tp in grid]
    assert [row["times tp=1"] for row in rows] == [1, 2, 4] * 3


def test_tensor_parallel_is_measured(ray_cluster: None, tmp_path: Path) -> None:
    rows = scale.tensor_parallel(TINY, tmp_path, STEPS, degrees=(1, 2), parts=(2,))
    assert [(row["layers"], row["tp"]) for row in rows] == [(2, 1), (2, 2)]
    assert all(float(row["step ms"]) > 0 for row in rows)
    with pytest.raises(rt.RaytrainError, match="never"):  # an existing run is not used as a measurement
        scale.measure([*scale.SMALL, *TINY], tmp_path / "tp1-layers2", STEPS)


def test_time_of_a_layer_is_the_slope_over_depth() -> None:
    times = {(8, 1): 90.0, (2, 1): 30.0, (8, 4): 200.0, (2, 4): 80.0}
    rows: list[scale.Row] = [{"layers": layers, "tp": tp, "step ms": ms} for (layers, tp), ms in times.items()]
    assert scale.fit_layer_time(rows, cores=2) == [
        {"tp": 1, "ms / layer": 10.0, "arithmetic alone": 10.0, "ms outside of layers": 10.0},
        {"tp": 4, "ms / layer": 20.0, "arithmetic alone": 5.0, "ms outside of layers": 40.0},
    ]


def test_microbatches_are_compared_with_the_closed_form(ray_cluster: None, tmp_path: Path) -> None:
    rows = scale.microbatches(TINY, tmp_path, STEPS, counts=(1, 4))
    assert [row["microbatches"] for row in rows] == [1, 4]
    assert [row["bubble"] for row in rows] == [1 / 2, 1 / 5]
    assert [row["ideal share"] for row in rows] == [1 / 2, 4 / 5]
    assert all(float(row["tok/s"]) > 0 for row in rows)
    # With one microbatch, each of two ranks is idle while the other computes, on any machine.
    assert float(rows[0]["recorded idle"]) > 0.4
    assert 0 < float(rows[1]["recorded idle"]) < 1
    assert (tmp_path / "microbatches4/timeline/step-00000005.svg").exists()
