"""Wrong input is rejected with one line, within seconds, and without writing to disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.wrong_inputs import (
    TRAIN,
    WRONG,
    Wrong,
    build_inputs,
    read_tree,
    run_case,
    run_in_new_process,
    run_in_process,
)

# Cases that also run in a new process: one each for settings, data, checkpoints and the lease.
IN_NEW_PROCESS = {"unknown key", "flipped byte in a shard", "checkpoint of another model", "second driver"}


@pytest.fixture(scope="module")
def inputs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    build_inputs(root)
    return root


def check(wrong: Wrong, result, inputs_dir: Path) -> None:
    assert result.code == 2, result.errors
    (line,) = [line for line in result.errors if not line.startswith("ray     ")]  # the cluster that is used
    assert line.startswith("error: ")
    for part in wrong.expected:
        assert part.replace("{dir}", str(inputs_dir)) in line
    assert result.seconds < 5


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.case)
def test_wrong_input(inputs_dir: Path, monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started for a wrong input")

    monkeypatch.setattr("ray.init", started)
    monkeypatch.chdir(inputs_dir)
    before = read_tree(inputs_dir)
    check(wrong, run_case(wrong, inputs_dir), inputs_dir)
    assert read_tree(inputs_dir) == before


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.case in IN_NEW_PROCESS], ids=lambda wrong: wrong.case)
def test_wrong_input_in_a_new_process(inputs_dir: Path, wrong: Wrong) -> None:
    before = read_tree(inputs_dir)
    check(wrong, run_in_new_process(wrong, inputs_dir), inputs_dir)
    assert read_tree(inputs_dir) == before


def test_more_workers_than_cpu_slots_are_rejected(inputs_dir: Path, ray_cluster: None) -> None:
    before = read_tree(inputs_dir)
    words = f"{TRAIN} train.global_batch_size=20 cluster.workers=9 cluster.start_timeout=0.1"
    wrong = Wrong("", words, ("cluster.workers=9", "8 free CPU slots"))
    check(wrong, run_in_process(wrong.argv, inputs_dir), inputs_dir)
    assert read_tree(inputs_dir) == before


def test_config_is_rejected_without_importing_torch_or_ray() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, ray=None); from raytrain_hpc.cli.main import main; "
        "main(['train', 'data.path=synthetic', 'cluster.workers=13', 'train.global_batch_size=12'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: train.global_batch_size=12")


@pytest.mark.parametrize(
    "argv", ["trian", "", "prepare", "prepare x", "inspect", "generate", "bench walk", "plan --workers 0"]
)
def test_usage_errors_exit_with_code_2(inputs_dir: Path, argv: str) -> None:
    result = run_in_process(argv, inputs_dir)
    assert result.code == 2 and "Traceback" not in "\n".join(result.errors)
