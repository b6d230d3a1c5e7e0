"""Every command in README.md and docs/ works.

Commands of `console` blocks run, in the order of the page, in a folder of the page's own. The others need a cluster, a
GPU or more time; their options, settings and layouts are checked.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import torch
import yaml

from raytrain_hpc.cli.main import main
from raytrain_hpc.cli.options import split_words
from raytrain_hpc.cli.sweep import make_options
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.schema import AUTO, SECTIONS, Config
from raytrain_hpc.planner.layout import (
    check_model_divisible,
    get_fixed_world_size,
    get_min_world_size,
    resolve_batching,
    resolve_layout,
)
from raytrain_hpc.sweeps.sweep_plan import SweepPlan
from tests.docs.documents import PAGES, PROGRAM, ROOT, find_code_spans, list_program_calls, read_blocks
from tests.docs.workspace import TINY, call, make_workspace

CPU_WORKERS = 2  # of cluster.workers=auto
BYTES = 256  # vocabulary of the built-in dataset


@pytest.fixture(scope="module", autouse=True)
def restore_torch() -> Iterator[None]:
    """Undo what training in this process sets for the process."""
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    yield
    torch.set_num_threads(threads)
    torch.set_deterministic_debug_mode(mode)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("workspace")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        make_workspace(root)
    return root


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page(page: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shutil.copytree(workspace, tmp_path / "page"))
    for block in read_blocks(page):
        for command in block.commands:
            try:
                if block.language == "console":
                    run_command(command)
                else:
                    check_command(command)
            except Exception as error:
                raise AssertionError(f"{page.name}, line {block.line}: {command}: {error}") from error


def test_pages_use_a_name_for_the_same_thing() -> None:
    """Someone who follows several pages gets no dataset, run or model of another page."""
    calls_by_name: dict[tuple[str, str], dict[str, list[list[str]]]] = {}
    for page in PAGES:
        commands = [command for block in read_blocks(page) for command in block.commands]
        for arguments in (words for command in commands for words in list_program_calls(command)):
            for target in find_targets(arguments):
                calls_by_name.setdefault(target, {}).setdefault(page.name, []).append(arguments)
    different = {
        name: calls
        for name, calls in calls_by_name.items()
        if any(of_page != next(iter(calls.values())) for of_page in calls.values())
    }
    assert not different


def find_targets(arguments: list[str]) -> list[tuple[str, str]]:
    """Return the run or the directory that a command writes: (kind, name)."""
    names = [("run", word.removeprefix("run.name=")) for word in arguments if word.startswith("run.name=")]
    is_out = zip(arguments, arguments[1:], strict=False)
    return names + [("directory", value) for option, value in is_out if option == "--out"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_of_a_page_exist(page: Path) -> None:
    wrong = []
    for span in find_code_spans(page.read_text()):
        program, *words = span.partition(" -- ")[0].split()
        if program != PROGRAM or not words or not re.fullmatch(r"[a-z-]+", words[0]):
            continue
        command = main.get_command(click.Context(main), words[0])
        options = {option for parameter in getattr(command, "params", ()) for option in parameter.opts}
        unknown = {word for word in words[1:] if re.fullmatch(r"--[a-z-]+", word)} - options
        if command is None or unknown:
            wrong.append(span)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_yaml_of_a_page_is_a_config(page: Path, tmp_path: Path) -> None:
    for block in read_blocks(page):
        if block.language == "yaml" and set(yaml.safe_load(block.text)) <= {*SECTIONS, "base"}:
            shutil.copytree(ROOT / "conf", tmp_path, dirs_exist_ok=True)
            (tmp_path / "page.yaml").write_text(block.text)
            check_layout(load_config(tmp_path / "page.yaml"))


def run_command(command: str) -> None:
    """Run a command: raytrain-hpc in this process, with tiny settings; others in a shell."""
    if not command.startswith(f"{PROGRAM} "):
        subprocess.run(["bash", "-euc", command], check=True, capture_output=True, timeout=30)
        return
    (arguments,) = list_program_calls(command)
    call([*arguments, *TINY] if arguments[0] == "train" else arguments)


def check_command(command: str) -> None:
    """Check the syntax of a shell command, and options, settings and layout of its calls of raytrain-hpc."""
    subprocess.run(["bash", "-n", "-c", command], check=True, timeout=10)
    for name, *arguments in list_program_calls(command):
        subcommand = main.get_command(click.Context(main), name)
        if subcommand is None:
            raise AssertionError(f"no command {name}")
        parameters = subcommand.make_context(name, list(arguments)).params
        if "words" not in parameters:
            continue
        source, overrides = split_words(parameters["words"])
        if name == "sweep":
            options = {name: value for name, value in parameters.items() if name not in ("words", "as_json")}
            SweepPlan(load_config(source, overrides), make_options(**options))
            continue
        config = load_config(source, overrides)
        if name in ("train", "run", "drill"):
            check_layout(config)


def check_layout(config: Config) -> None:
    """Raise LayoutError unless the config has a layout on the workers that it names, else on the fewest possible."""
    world_size = get_fixed_world_size(config) or max(CPU_WORKERS, get_min_world_size(config))
    resolve_batching(config, resolve_layout(config, world_size))
    vocabulary = BYTES if config.model.vocab_size == AUTO else None
    check_model_divisible(config, resolve_model_spec(config.model, vocab_size=vocabulary, seq_len=config.train.seq_len))
