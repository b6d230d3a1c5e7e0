"""The comparison of recoveries: what its peers report, when they fail, and how their losses are compared."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from raytrain_hpc.bench import restart_baseline
from raytrain_hpc.bench.contenders import read_jsonl
from raytrain_hpc.bench.growth import find_pause
from raytrain_hpc.bench.peer_check import RECOVERY_PEERS, parse_peers, parse_pythons
from raytrain_hpc.bench.recovery import describe_losses
from raytrain_hpc.bench.recovery_systems import DEFAULT_PEERS, PEERS, can_grow, check_systems, list_systems
from raytrain_hpc.bench.step_report import RAISED_FILE, StepReport, request_exception
from raytrain_hpc.bench.workloads import build_baseline_job
from raytrain_hpc.errors import MissingDependencyError
from tests.driver.cli_process import CliRunner
from tests.warm_pool import make_small_config

STEPS = 14


def test_an_exception_is_raised_once_by_one_rank_at_one_step(tmp_path: Path) -> None:
    request_exception(tmp_path, rank=1, step=3)
    first, second = StepReport(tmp_path, 0, reports=True), StepReport(tmp_path, 1, reports=False)
    for step in range(5):
        first.raise_if_injected(step)
        first.record(step + 1, 0.5 * step)
    second.raise_if_injected(2)
    assert not (tmp_path / RAISED_FILE).exists()
    with pytest.raises(ArithmeticError):
        second.raise_if_injected(3)
    assert (tmp_path / RAISED_FILE).exists()
    second.raise_if_injected(3)  # the step is run again
    assert [(line["step"], line["train/loss"]) for line in read_jsonl(tmp_path / "steps.jsonl")] == [
        (1, 0.0),
        (2, 0.5),
        (3, 1.0),
        (4, 1.5),
        (5, 2.0),
    ]
    assert [int((tmp_path / f"{rank}.pid").read_text()) for rank in (0, 1)] == [os.getpid()] * 2


# As torchrun starts one process, whose modules are imported already.
LAUNCHER = f"""
import os, runpy
os.environ |= {{"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}}
runpy.run_path({restart_baseline.__file__!r}, run_name="__main__")
"""


def run_restart_baseline(cli: CliRunner, directory: Path, *, fails_at: int | None) -> list[tuple[int, float]]:
    """Run the baseline, and again after a failure, as torchrun does. Return step and loss of all lines."""
    directory.mkdir()
    job = build_baseline_job(make_small_config(None, f"train.steps={STEPS}"), 1, directory)
    (directory / "job.json").write_text(json.dumps(job.to_json()))
    (directory / "launcher.py").write_text(LAUNCHER)
    command = (directory / "launcher.py", str(directory / "job.json"), str(directory))
    if fails_at is not None:
        request_exception(directory, 0, fails_at)
        code, output = cli.run_script(directory / "first", *command)
        assert code == 1 and output.endswith("ArithmeticError: injected\n"), output
    code, output = cli.run_script(directory / "last", *command)
    assert code == 0, output
    return [(line["step"], line["train/loss"]) for line in read_jsonl(directory / "steps.jsonl")]


def test_a_peer_that_restarts_repeats_the_steps_since_its_checkpoint(cli: CliRunner, tmp_path: Path) -> None:
    undisturbed = run_restart_baseline(cli, tmp_path / "a", fails_at=None)
    disturbed = run_restart_baseline(cli, tmp_path / "b", fails_at=13)
    assert [step for step, _ in undisturbed] == list(range(1, STEPS + 1))
    assert [step for step, _ in disturbed] == [*range(1, 14), *range(11, STEPS + 1)], "its checkpoint is of step 10"
    assert describe_losses([dict(disturbed)], dict(undisturbed)) == "same bits"


def test_losses_are_compared_bit_for_bit() -> None:
    reference = {1: 4.0, 2: 2.0}
    assert describe_losses([reference, {**reference, 3: 9.0}], reference) == "same bits"
    assert describe_losses([reference, {1: 4.0, 2: 2.0 + 2**-51}], reference) == "up to 2.2e-16 apart"


def test_peers_of_the_command_line() -> None:
    assert set(PEERS) == {*RECOVERY_PEERS, "nvrx, one spare"} and set(DEFAULT_PEERS) < set(RECOVERY_PEERS)
    peers = parse_peers("recovery", ["torchrun,nvrx", "torchft"])
    assert list(peers) == ["torchrun", "nvrx", "torchft"]
    assert list_systems(list(peers)) == [
        "platform",
        "platform, one spare",
        "torchrun",
        "nvrx",
        "nvrx, one spare",
        "torchft",
    ]
    assert parse_pythons([f"torchft={sys.executable}"], peers) == {"torchft": sys.executable}
    with pytest.raises(ValueError, match=r"--python torchx=python: expected PEER=PATH .* \(torchrun, nvrx"):
        parse_pythons(["torchx=python"], peers)
    with pytest.raises(ValueError, match="/no/python is no program"):
        parse_pythons(["torchft=/no/python"], peers)
    with pytest.raises(ValueError, match="only `bench step`, `bench device` and `bench recovery` compare with other"):
        parse_peers("data", ["torchft"])


def test_a_peer_that_is_not_installed_is_named_with_a_remedy() -> None:
    check_systems(["torchrun"], {})
    with pytest.raises(MissingDependencyError, match=r"--against torchft: .*false cannot .*pip install torchft"):
        check_systems(["torchrun", "torchft"], {"torchft": "/bin/false"})


def make_steps(*steps: tuple[int, float, int]) -> list[dict[str, float]]:
    return [{"step": step, "time/unix": unix, "elastic/world_size": world} for step, unix, world in steps]


def test_a_pause_is_the_longest_time_between_two_steps_of_a_change() -> None:
    alone = [(step, 0.1 * step, 1) for step in range(1, 11)]  # the request comes at 0.95
    joined = [(11, 1.1, 1), (12, 1.6, 2), (13, 1.7, 2), (14, 1.8, 2), (15, 1.9, 2), (16, 9.0, 2)]
    assert find_pause(make_steps(*alone, *joined[:4]), 0.95) is None, "not four steps on two ranks yet"
    pause_s, joined_s, repeated = find_pause(make_steps(*alone, *joined), 0.95) or (0.0, 0.0, 0)
    assert (pause_s, joined_s, repeated) == (pytest.approx(0.5), pytest.approx(0.65), 0)


def test_steps_that_are_repeated_from_a_checkpoint_are_counted() -> None:
    steps = make_steps((1, 0.1, 1), (2, 0.2, 1), (3, 0.3, 1), (2, 5.0, 2), (3, 5.1, 2), (4, 5.2, 2), (5, 5.3, 2))
    assert find_pause(steps, 0.25) == (pytest.approx(4.7), pytest.approx(4.75), 2)


def test_which_systems_grow() -> None:
    assert [name for name in ("platform", "platform, one spare", *PEERS) if can_grow(name)] == [
        *("platform", "torchrun", "torchft")
    ]
