"""Wrong input is rejected with one line, within seconds, and without writing to disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.wrong_inputs import TRAIN, WRONG, Wrong, answer_to, build_workshop, call, call_alone, tree

# Cases that also run in a new process: one each for settings, data, checkpoints and the lease.
ALSO_ALONE = {"unknown key", "flipped byte in a shard", "checkpoint of another model", "second driver"}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workshop")
    build_workshop(root)
    return root


def check(wrong: Wrong, answer, workshop: Path) -> None:
    assert answer.code == 2, answer.errors
    (line,) = answer.errors
    assert line.startswith("error: ")
    for part in wrong.says:
        assert part.replace("{dir}", str(workshop)) in line
    assert answer.seconds < 5


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.case)
def test_wrong_input(workshop: Path, monkeypatch: pytest.MonkeyPatch, wrong: Wrong) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("Ray was started for a wrong input")

    monkeypatch.setattr("ray.init", started)
    monkeypatch.chdir(workshop)
    before = tree(workshop)
    check(wrong, answer_to(wrong, workshop), workshop)
    assert tree(workshop) == before


@pytest.mark.parametrize("wrong", [w for w in WRONG if w.case in ALSO_ALONE], ids=lambda wrong: wrong.case)
def test_wrong_input_in_a_new_process(workshop: Path, wrong: Wrong) -> None:
    before = tree(workshop)
    check(wrong, call_alone(wrong, workshop), workshop)
    assert tree(workshop) == before


def test_more_workers_than_cpu_slots_are_rejected(workshop: Path, ray_cluster: None) -> None:
    before = tree(workshop)
    wrong = Wrong("", f"{TRAIN} train.global_batch=20 cluster.workers=9", ("cluster.workers=9", "8 free CPU slots"))
    check(wrong, call(wrong.argv, workshop), workshop)
    assert tree(workshop) == before


def test_config_is_rejected_without_importing_torch_or_ray() -> None:
    program = (
        "import sys; sys.modules.update(torch=None, ray=None); from raytrain_hpc.cli.main import main; "
        "main(['train', 'data.path=synthetic', 'cluster.workers=13', 'train.global_batch=12'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: train.global_batch=12")


@pytest.mark.parametrize(
    "argv", ["trian", "", "prepare", "prepare x", "inspect", "generate", "bench walk", "plan --workers 0"]
)
def test_usage_errors_exit_with_code_2(workshop: Path, argv: str) -> None:
    answer = call(argv, workshop)
    assert answer.code == 2 and "Traceback" not in "\n".join(answer.errors)
