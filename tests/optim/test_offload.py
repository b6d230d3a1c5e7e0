"""Offload of the optimizer changes no bit, bounds what is in memory, and leaves nothing behind."""

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
from raytrain_hpc.config.schema import TrainConfig
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


def disk(directory: Path) -> list[str]:
    return ["parallel.offload=disk", f"parallel.offload_dir={directory / 'scratch'}"]


def numbers(records: list[list[dict]]) -> list[tuple[float, float]]:
    return [(step["train/loss"], step["train/grad_norm"]) for step in get_step_metrics(records[0])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_norms_and_checkpoints_are_bit_for_bit_those_of_none(
    pool: WarmPool, tmp_path: Path, layout: str
) -> None:
    words, made = LAYOUTS[layout], {}
    for home, more in {"none": [], "cpu": ["parallel.offload=cpu"], "disk": disk(tmp_path)}.items():
        records = pool.train(make_small_config(tmp_path / home, *words, *more))
        shards = [record["shard"] for of_rank in records for record in of_rank if record["type"] == "shard"]
        made[home] = numbers(records), shards  # with the checksums of weights and moments
    assert len(made["none"][0]) == 5 and made["none"][1]
    assert made["cpu"] == made["none"]
    assert made["disk"] == made["none"]
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize(("first", "then"), [("disk", "none"), ("none", "disk")])
def test_a_checkpoint_of_one_home_goes_on_in_another(pool: WarmPool, tmp_path: Path, first: str, then: str) -> None:
    words = {"none": [], "disk": disk(tmp_path)}
    straight = numbers(pool.train(make_small_config(tmp_path / "straight")))
    begun = numbers(pool.train(make_small_config(tmp_path / "run", *words[first]), steps_to=3))
    ended = numbers(pool.train(make_small_config(tmp_path / "run", *words[then]), resume_step=3))
    assert begun + ended == straight


class Staged(CpuOffload):
    """Does on a CPU what is done for a GPU: a part is a copy of weights and gradients, and goes back."""

    def _to_host(self, chunk: OptimizerChunk) -> OptimizerChunk:
        return OptimizerChunk([w.clone() for w in chunk.weights], [g.clone() for g in chunk.gradients], chunk.moments)


def stepped(home: type[CpuOffload] | None, dtype: torch.dtype, directory: Path) -> list[torch.Tensor]:
    """Weights and moments after three steps of tensors larger than a chunk, small, empty and transposed."""
    draw = torch.Generator().manual_seed(1)
    shapes = {"a": (333, 77), "b": (5,), "c": (100003,), "d": (0, 4), "e": (1, 1), "f": (7,)}
    parameters = {
        name: nn.Parameter(torch.randn(*shape, generator=draw, dtype=dtype)) for name, shape in shapes.items()
    }
    parameters["t"] = nn.Parameter(torch.randn(90, 70, generator=draw, dtype=dtype).t())
    slices = get_local_slices(parameters)
    made: MomentStorage
    if home is None:
        made = OnDevice(slices, KINDS)
    elif home is DiskOffload:
        made = DiskOffload(slices, KINDS, str(directory), 2**17)
    else:
        made = home(slices, KINDS, 2**17)
    optimizer = Optimizer(parameters, TrainConfig(), made)
    for step in range(3):
        for name, parameter in parameters.items():
            if (name, step) != ("f", 1):  # not reached by the loss
                parameter.grad = torch.randn(parameter.shape, generator=draw, dtype=dtype)
        optimizer.step(1e-2)
    optimizer.release_memory()
    return [*slices.values(), *(optimizer.moments[kind][name] for kind in KINDS for name in slices)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("home", [CpuOffload, Staged, DiskOffload])
def test_chunks_change_no_bit(tmp_path: Path, home: type[CpuOffload], dtype: torch.dtype) -> None:
    for mine, expected in zip(stepped(home, dtype, tmp_path), stepped(None, dtype, tmp_path), strict=True):
        assert torch.equal(mine, expected)


def test_gaps_between_elements_are_refused() -> None:
    with pytest.raises(ModelError, match=r"^w: elements with gaps"):
        CpuOffload({"w": torch.zeros(4, 4)[:, :2]}, KINDS)


# After every part of a step, before it is let go: resident bytes of the scratch file, and of the process.
RESIDENT = """
import json, sys
import torch
from torch import nn
from raytrain_hpc.config.schema import TrainConfig
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
    def _post_step(self, part):
        seen.append(resident())
        super()._post_step(part)

seen, base = [], resident()[1]
home = Watched(get_local_slices({"w": weight}), MOMENT_NAMES["adamw"], directory, chunk)
optimizer = Optimizer({"w": weight}, TrainConfig(), home)
started = resident()[0]
for step in range(2):
    weight.grad = gradient
    optimizer.step(1e-3)
total = sum(float(of["w"].sum()) for of in optimizer.moments.values())  # reads them all, as saving does
everything = resident()[0]
optimizer.release_memory()
print(json.dumps({"parts": len(seen), "started": started, "mapped": max(m for m, _ in seen),
                  "grown": max(p for _, p in seen) - base, "everything": everything, "rested": resident()[0],
                  "total": total}))
"""


def test_what_is_resident_is_a_few_chunks_whatever_the_size(tmp_path: Path) -> None:
    count, chunk = 4 * 2**20, 2**20
    moments = 8 * count  # 32 chunks
    command = [sys.executable, "-c", RESIDENT, str(tmp_path), str(count), str(chunk)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["parts"] == 2 * 32 and seen["total"] > 0
    assert seen["started"] < 2**16, "moments are zero without having been touched"
    assert 0 < seen["mapped"] <= 3 * chunk
    assert seen["grown"] < moments / 2, "the kernel's code and the like, but not the moments"
    assert seen["everything"] > moments / 2 and seen["rested"] == 0


TRAINED = """
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
def test_no_end_leaves_anything_behind(tmp_path: Path, end: str) -> None:
    words = [*SMALL_OVERRIDES, "cluster.workers=0", f"run.dir={tmp_path / 'run'}", *disk(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, end, *words], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
    said, count = done.stdout.split()
    if end == "kill":
        assert said == "held" and int(count) > 0, "it had its file open"
    else:
        assert (said, count) == ("mapped", "0"), "a process that lives on has let go of it, without a collector's help"
    assert (tmp_path / "scratch").is_dir() and not list((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parallel.offload=disk"], "parallel.offload_dir='' .*: parallel.offload=disk needs a directory"),
        (["parallel.offload=cpu", "train.optimizer=sgd"], "parallel.offload='cpu' .*sgd keeps no state"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace(" .*", ".*")):
        load_config(None, words)


def refused(directory: Path, parameters: int) -> str:
    config = load_config(None, ["parallel.offload=disk", f"parallel.offload_dir={directory}"])
    with pytest.raises(OffloadError) as error:
        make_moment_storage(config, {"w": torch.empty(1).expand(parameters)}, KINDS, 3)
    said = str(error.value)
    assert said.startswith(f"parallel.offload_dir='{directory}' (command line): ") and "\n" not in said
    assert "rank 3 keeps" in said and "choose a directory on another disk" in said
    return said


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert "Not a directory" in refused(tmp_path / "file" / "below", 10)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"may not mount a small file system here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_too_small_is_refused_before_it_is_written(small_disk: Path) -> None:
    said = refused(small_disk, 2**21)
    assert "No space left on device: rank 3 keeps 0.02 GiB of optimizer state there (0.01 GiB are free)" in said
    assert not list(small_disk.iterdir())
    free = os.statvfs(small_disk)
    assert free.f_bavail == free.f_blocks, "what was reserved is given back"


def test_the_plan_counts_the_device_alone() -> None:
    none, cpu, disk_ = (
        plan(load_config(None, [f"parallel.offload={home}", "parallel.offload_dir=/x", "cluster.workers=1"]))
        for home in ("none", "cpu", "disk")
    )
    assert none["state_bytes_per_rank"] == 16 * none["parameters"]
    assert cpu["state_bytes_per_rank"] == disk_["state_bytes_per_rank"] == 8 * none["parameters"]
