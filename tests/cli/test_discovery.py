"""Commands that show keys and recipes, completion, and options that are settings elsewhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from raytrain_hpc.cli.completion import complete_config_word, complete_name
from raytrain_hpc.cli.main import COMMANDS, main
from raytrain_hpc.config.presets import PRESETS
from raytrain_hpc.config.recipes import list_recipes
from raytrain_hpc.config.schema import SECTIONS, get_fields


def run(*argv: str) -> str:
    result = CliRunner().invoke(main, argv)
    assert result.exit_code == 0, result.output
    return result.output


def complete(*previous: str, incomplete: str = "") -> list[str]:
    return [item.value for item in complete_config_word(previous, incomplete)]


def test_config_lists_every_key_with_its_description() -> None:
    output = " ".join(run("config").split())
    for key, field in get_fields().items():
        assert f" {key}=" in output and " ".join(field.metadata["doc"].split()) in output
    assert f"{len(get_fields())} keys in {len(SECTIONS)} sections" in output


def test_config_explains_a_key_and_a_section() -> None:
    output = run("config", "logging.interval", "lora")
    assert "logging.interval=10  (a whole number)" in output and "At least 1." in output
    assert "Formerly observe.log_every." in output and "Fixed" not in output
    assert output.count("lora.") == 3 and "train." not in output


def test_config_says_which_keys_a_run_keeps() -> None:
    for key in ("optimizer.lr", "model.num_layers"):
        assert "Fixed once the run has a checkpoint." in run("config", key)


def test_config_prints_resolved_settings_with_their_origins() -> None:
    lines = run("config", "--print", "llama3_8b", "train.steps=5000", "parallel.tp=auto").splitlines()
    found = {line.split("=")[0]: line for line in lines}
    assert list(found) == list(get_fields())
    assert found["train.steps"].split() == ["train.steps=5000", "#", "command", "line"]
    assert found["optimizer.lr"].endswith("# recipe llama3_8b:27")
    assert found["model.num_layers"].endswith("# preset llama3_8b")
    assert found["parallel.tp"].startswith("parallel.tp=auto ") and found["run.seed"].endswith("# default")


def test_schema_is_printed_as_json() -> None:
    assert set(json.loads(run("config", "--schema"))["properties"]) == {"base", *SECTIONS}


def test_a_config_in_a_directory_named_by_a_setting_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of the trials of a sweep are."""
    path = tmp_path / "sweep" / "optimizer.lr=0.1" / "config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("train: {seq_len: 77}")
    monkeypatch.chdir(tmp_path)
    lines = run("config", "--print", "train.steps=9", str(path.relative_to(tmp_path))).splitlines()
    found = {line.split("=")[0]: line.split("#")[0].strip() for line in lines}
    assert (found["train.seq_len"], found["train.steps"]) == ("train.seq_len=77", "train.steps=9")


def test_recipes_are_listed_and_shown() -> None:
    output = run("recipes")
    for name in (*list_recipes(), *PRESETS):
        assert f"  {name} " in output
    assert run("recipes", "llama3_8b") == list_recipes()["llama3_8b"].read_text()
    assert "did you mean llama3_8b?" in CliRunner().invoke(main, ["recipes", "llama3_9b"]).output


@pytest.mark.parametrize(
    ("argv", "remedy"),
    [
        (["train", "--steps", "10"], "write train.steps=10"),
        (["train", "--max-steps=10"], "write train.steps=10"),
        (["train", "quickstart", "--bf16"], "write train.dtype=bf16"),
        (["plan", "--tensor_parallel_size", "4"], "write parallel.tp=4"),
        (["plan", "--worker", "4"], "did you mean --workers?"),
        (["drill", "--fault.stall_timeout", "2"], "write fault.stall_timeout=2"),
        (["train", "--zzz"], "`raytrain-hpc config` lists all keys"),
    ],
)
def test_setting_as_an_option_is_answered_with_the_word(argv: list[str], remedy: str) -> None:
    result = CliRunner().invoke(main, argv)
    assert result.exit_code == 2 and remedy in result.output
    assert result.output.startswith("error: --") and result.output.count("\n") == 1


def test_keys_values_recipes_and_files_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    assert complete(incomplete="train.st") == ["train.steps="]
    assert complete(incomplete="m")[0] == "mine.yaml" and "notes.txt" not in complete(incomplete="n")
    assert complete(incomplete="llama") == ["llama3_1b", "llama3_70b", "llama3_8b"]
    assert complete("llama3_8b", incomplete="llama") == [], "one config file at a time"
    assert complete(incomplete="train.dtype=b") == ["train.dtype=bf16"], "zsh and fish keep the word whole"
    assert complete("train.dtype", "=", incomplete="b") == ["bf16"], "bash splits it at ="
    assert complete("train.dtype", incomplete="") == ["auto", "fp32", "bf16", "float8", "fp64"], "bash, right behind ="
    assert complete("train.dtype", "=", "bf16", incomplete="train.deter") == ["train.deterministic="]
    assert complete("parallel.tp", "=", incomplete="") == ["auto"]
    assert [item.value for item in complete_name("lora")] == ["lora", "lora.rank", "lora.alpha", "lora.target_modules"]


def test_completion_script_works_in_bash() -> None:
    program = (
        'eval "$(_RAYTRAIN_HPC_COMPLETE=bash_source raytrain-hpc)"; COMP_WORDS=(raytrain-hpc %s); COMP_CWORD=%d; '
        '_raytrain_hpc_completion raytrain-hpc; echo "${COMPREPLY[@]}"'
    )
    for words, cword, expected in (("do", 1, "doctor"), ("train train.ste", 2, "train.steps=")):
        done = subprocess.run(
            ["bash", "-c", f"compopt() {{ :; }}; {program % (words, cword)}"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
        )
        assert done.stdout.strip() == expected, done.stderr


def test_help_of_train_names_the_commands_that_list_settings() -> None:
    output = " ".join(run("train", "--help").split())
    assert "raytrain-hpc recipes" in output and "raytrain-hpc config" in output
    assert all(f"  {command} " in run("--help") for command in COMMANDS)


def test_the_package_is_found_beside_a_directory_of_the_same_name(tmp_path: Path) -> None:
    """As beside a clone of the repository, which would else be a namespace package."""
    (tmp_path / "raytrain_hpc/data").mkdir(parents=True)
    code = "import raytrain_hpc.data.loader, raytrain_hpc as rt; print(rt.load_config)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0 and "load_config" in process.stdout, process.stderr
