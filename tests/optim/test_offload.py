"""Optimizer offload changes no bit, bounds the resident memory, and leaves no files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from raytrain_hpc import plan
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import OptimizerConfig
from raytrain_hpc.errors import ConfigError, ModelError, OffloadError
from raytrain_hpc.optim.offload import (
    CpuOffload,
    DiskOffload,
    MomentStorage,
    OnDevice,
    OptimizerChunk,
    make_moment_storage,
)
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
from tests.warm_pool import SMALL_OVERRIDES, WarmPool, get_step_metrics, make_small_config

KINDS = MOMENT_NAMES["adamw"]
LAYOUTS = {
    "one rank": [],
    "zero1-2": ["cluster.workers=2", "parallel.zero=1"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
}


def disk_overrides(directory: Path) -> list[str]:
    return ["parallel.offload=disk", f"parallel.offload_dir={directory / 'scratch'}"]


def get_losses_and_norms(records: list[list[dict]]) -> list[tuple[float, float]]:
    return [(step["train/loss"], step["train/grad_norm"]) for step in get_step_metrics(records[0])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_norms_and_checkpoints_equal_those_without_offload(pool: WarmPool, tmp_path: Path, layout: str) -> None:
    overrides, results = LAYOUTS[layout], {}
    for offload, offload_overrides in {
        "none": [],
        "cpu": ["parallel.offload=cpu"],
        "disk": disk_overrides(tmp_path),
    }.items():
        records = pool.train(make_small_config(tmp_path / offload, *overrides, *offload_overrides))
        shards = [record["shard"] for rank_records in records for record in rank_records if record["type"] == "shard"]
        results[offload] = get_losses_and_norms(records), shards  # includes the checksums of weights and moments
    assert len(results["none"][0]) == 5 and results["none"][1]
    assert results["cpu"] == results["none"]
    assert results["disk"] == results["none"]
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize(("first", "second"), [("disk", "none"), ("none", "disk")])
def test_checkpoint_resumes_with_another_storage(pool: WarmPool, tmp_path: Path, first: str, second: str) -> None:
    overrides = {"none": [], "disk": disk_overrides(tmp_path)}
    uninterrupted = get_losses_and_norms(pool.train(make_small_config(tmp_path / "uninterrupted")))
    before_resume = get_losses_and_norms(pool.train(make_small_config(tmp_path / "run", *overrides[first]), steps_to=3))
    after_resume = get_losses_and_norms(
        pool.train(make_small_config(tmp_path / "run", *overrides[second]), resume_step=3)
    )
    assert before_resume + after_resume == uninterrupted


class Staged(CpuOffload):
    """CPU offload with the copies that a GPU needs: chunks are updated as copies, which are copied back."""

    def _to_host(self, chunk: OptimizerChunk) -> OptimizerChunk:
        return OptimizerChunk([w.clone() for w in chunk.weights], [g.clone() for g in chunk.gradients], chunk.moments)


def run_steps(storage_type: type[CpuOffload] | None, dtype: torch.dtype, directory: Path) -> list[torch.Tensor]:
    """Return weights and moments after three steps, of tensors larger than a chunk, small, empty and transposed."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"a": (333, 77), "b": (5,), "c": (100003,), "d": (0, 4), "e": (1, 1), "f": (7,)}
    parameters = {
        name: nn.Parameter(torch.randn(*shape, generator=generator, dtype=dtype)) for name, shape in shapes.items()
    }
    parameters["t"] = nn.Parameter(torch.randn(90, 70, generator=generator, dtype=dtype).t())
    slices = get_local_slices(parameters)
    storage: MomentStorage
    if storage_type is None:
        storage = OnDevice(slices, KINDS)
    elif storage_type is DiskOffload:
        storage = DiskOffload(slices, KINDS, str(directory), 2**17)
    else:
        storage = storage_type(slices, KINDS, 2**17)
    optimizer = Optimizer(parameters, OptimizerConfig(), storage, elastic=False)
    for step in range(3):
        for name, parameter in parameters.items():
            if (name, step) != ("f", 1):  # not reached by the loss
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype)
        optimizer.step(1e-2)
    optimizer.release_memory()
    return [*slices.values(), *(optimizer.moments[kind][name] for kind in KINDS for name in slices)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("storage_type", [CpuOffload, Staged, DiskOffload])
def test_chunks_keep_the_bits(tmp_path: Path, storage_type: type[CpuOffload], dtype: torch.dtype) -> None:
    for actual, expected in zip(
        run_steps(storage_type, dtype, tmp_path), run_steps(None, dtype, tmp_path), strict=True
    ):
        assert torch.equal(actual, expected)


def test_tensor_with_gaps_is_rejected() -> None:
    with pytest.raises(ModelError, match=r"^w: elements with gaps"):
        CpuOffload({"w": torch.zeros(4, 4)[:, :2]}, KINDS)
    parameters = {"w": nn.Parameter(torch.zeros(4, 4)[:, :2])}
    with pytest.raises(ModelError, match=r"^w: elements with gaps"):  # torch's fused kernel would fill the gaps
        Optimizer(parameters, OptimizerConfig(), OnDevice(get_local_slices(parameters), KINDS), elastic=False)


# After each chunk of a step, before it is released: resident bytes of the mapped file and of the process.
MEASURE_RESIDENT_MEMORY = """
import json, sys
import torch
from torch import nn
from raytrain_hpc.config.schema import OptimizerConfig
from raytrain_hpc.optim.offload import DiskOffload
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
directory, count, chunk = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
weight = nn.Parameter(torch.ones(count))
gradient = torch.ones(count)

def resident():
    lines = iter(open("/proc/self/smaps"))
    mapped = 0
    for line in lines:
        if directory in line:
            mapped += int(next(l for l in lines if l.startswith("Rss:")).split()[1]) * 1024
    process = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmRSS:")) * 1024
    return mapped, process

class Watched(DiskOffload):
    def _post_step(self, chunk):
        seen.append(resident())
        super()._post_step(chunk)

seen, base = [], resident()[1]
storage = Watched(get_local_slices({"w": weight}), MOMENT_NAMES["adamw"], directory, chunk)
optimizer = Optimizer({"w": weight}, OptimizerConfig(), storage, elastic=False)
started = resident()[0]
for step in range(2):
    weight.grad = gradient
    optimizer.step(1e-3)
total = sum(float(of["w"].sum()) for of in optimizer.moments.values())  # reads all moments, as saving does
everything = resident()[0]
optimizer.release_memory()
print(json.dumps({"chunks": len(seen), "started": started, "mapped": max(m for m, _ in seen),
                  "grown": max(p for _, p in seen) - base, "everything": everything, "released": resident()[0],
                  "total": total}))
"""


def test_resident_memory_is_a_few_chunks(tmp_path: Path) -> None:
    count, chunk = 4 * 2**20, 2**20
    moments = 8 * count  # 32 chunks
    command = [sys.executable, "-c", MEASURE_RESIDENT_MEMORY, str(tmp_path), str(count), str(chunk)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert process.returncode == 0, process.stderr
    measured = json.loads(process.stdout)
    assert measured["chunks"] == 2 * 32 and measured["total"] > 0
    assert measured["started"] < 2**16, "zero moments occupy no memory until they are accessed"
    assert 0 < measured["mapped"] <= 3 * chunk
    assert measured["grown"] < moments / 2, "code of the kernel, but not the moments"
    assert measured["everything"] > moments / 2 and measured["released"] == 0


TRAIN = """
import gc, os, signal, sys
import raytrain_hpc as rt
from raytrain_hpc.training.trainer import Trainer
real = Trainer.train_step
def step(self, number):
    if number == 3 and sys.argv[1] == "kill":
        links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        print("held", sum("scratch" in link for link in links), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, number)
Trainer.train_step = step
gc.disable()
rt.train(rt.load_config(None, sys.argv[2:]), quiet=True)
print("mapped", sum("scratch" in line for line in open("/proc/self/maps")))
"""


@pytest.mark.parametrize("end", ["kill", "done"])
def test_no_file_is_left_when_the_process_ends(tmp_path: Path, end: str) -> None:
    overrides = [*SMALL_OVERRIDES, "cluster.workers=0", f"run.dir={tmp_path / 'run'}", *disk_overrides(tmp_path)]
    process = subprocess.run(
        [sys.executable, "-c", TRAIN, end, *overrides], capture_output=True, text=True, timeout=100, check=False
    )
    assert process.returncode == (-signal.SIGKILL if end == "kill" else 0), process.stderr
    label, count = process.stdout.split()
    if end == "kill":
        assert label == "held" and int(count) > 0, "its file was open"
    else:
        assert (label, count) == ("mapped", "0"), "the file is unmapped without the garbage collector"
    assert (tmp_path / "scratch").is_dir() and not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.offload=disk"], "parallel.offload_dir='' .*: parallel.offload=disk needs a directory"),
        (["parallel.offload=cpu", "optimizer.name=sgd"], "parallel.offload='cpu' .*sgd keeps no state"),
    ],
)
def test_inconsistent_settings_are_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(" .*", ".*")):
        load_config(None, overrides)


def get_offload_error(directory: Path, parameters: int) -> str:
    config = load_config(None, ["parallel.offload=disk", f"parallel.offload_dir={directory}"])
    with pytest.raises(OffloadError) as error:
        make_moment_storage(config, 3, {"w": torch.empty(1).expand(parameters)}, KINDS)
    message = str(error.value)
    assert message.startswith(f"parallel.offload_dir='{directory}' (load_config): ") and "\n" not in message
    assert "rank 3 needs" in message and "choose a directory on another disk" in message
    return message


def test_unusable_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "Not a directory" in get_offload_error(tmp_path / "file" / "below", 10)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", mount_point]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        pytest.skip(f"cannot mount a small file system: {process.stderr.strip()}")
    yield mount_point
    subprocess.run(["umount", "-l", mount_point], check=True)


def test_full_disk_is_rejected_before_it_is_written(small_disk: Path) -> None:
    message = get_offload_error(small_disk, 2**21)
    assert "No space left on device: rank 3 needs 0.02 GiB for optimizer state (0.01 GiB free)" in message
    assert not list(small_disk.iterdir())
    disk_usage = os.statvfs(small_disk)
    assert disk_usage.f_bavail == disk_usage.f_blocks, "the reserved space is freed"


def test_plan_counts_only_device_memory() -> None:
    none, cpu, disk_ = (
        plan(load_config(None, [f"parallel.offload={offload}", "parallel.offload_dir=/x", "cluster.workers=1"]))
        for offload in ("none", "cpu", "disk")
    )
    assert none["state_bytes_per_rank"] == 16 * none["parameters"]
    assert cpu["state_bytes_per_rank"] == disk_["state_bytes_per_rank"] == 8 * none["parameters"]
