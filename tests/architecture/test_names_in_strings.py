"""Names in strings refer to existing objects: public names, command files, benchmarks, package data, links."""

from __future__ import annotations

import ast
import inspect
import re
import tomllib
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist

import raytrain_hpc
from raytrain_hpc.bench import BENCHMARKS
from raytrain_hpc.cli.main import COMMANDS
from raytrain_hpc.parallel.blocking_collectives import get_blocking_files, wait_all
from tests.conftest import QUICK_TESTS, SERIAL_TESTS
from tests.warm_pool import PRELOADED_MODULES

PACKAGE = Path(raytrain_hpc.__file__).parent
ROOT = PACKAGE.parent
TESTS = Path(__file__).parents[1]
NOT_COMMANDS = {
    "__init__",
    "main",
    "options",
    "check",
    "cluster_checks",
    "wiring_checks",
    "completion",
    "autotune",
    "plan_table",
    "train_summary",
    "trial",
}


def get_typed_imports() -> dict[str, str]:
    """Return the module of each name that `raytrain_hpc/__init__.py` imports for type checkers."""
    nodes = ast.walk(ast.parse((PACKAGE / "__init__.py").read_text()))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and str(node.module).startswith("raytrain")]
    return {alias.name: str(node.module).removeprefix("raytrain_hpc.") for node in imports for alias in node.names}


def test_public_names_have_the_types_and_modules_that_editors_see() -> None:
    assert get_typed_imports() == raytrain_hpc._MODULES
    assert sorted(raytrain_hpc.__all__) == sorted([*raytrain_hpc._MODULES, "__version__"])
    for name in raytrain_hpc.__all__:
        assert getattr(raytrain_hpc, name) is not None
    assert dir(raytrain_hpc) == sorted(raytrain_hpc.__all__)
    assert raytrain_hpc.__version__ == version("raytrain-hpc")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = raytrain_hpc.trian


def test_every_exception_is_public() -> None:
    errors = import_module("raytrain_hpc.errors")
    exceptions = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert exceptions <= set(raytrain_hpc.__all__)


def test_no_module_has_the_name_of_a_public_function() -> None:
    functions = {name for name in raytrain_hpc.__all__ if inspect.isfunction(getattr(raytrain_hpc, name))}
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert functions >= {"plan", "train", "start", "attach", "prepare", "generate", "report", "load_config"}
    assert not functions & modules


def test_quick_tests_exist_need_no_ray_and_cover_every_package() -> None:
    for name in QUICK_TESTS:
        assert (TESTS / f"{name}.py").is_file(), name
    assert not QUICK_TESTS & SERIAL_TESTS
    packages = {path.name for path in TESTS.iterdir() if any(path.rglob("test_*.py"))}
    # The tests of these take processes, or imports of seconds.
    assert packages - {name.split("/")[0] for name in QUICK_TESTS} == {
        *("bench", "combinations", "examples", "huggingface", "runtime", "worker")
    }


def test_every_command_is_in_the_file_of_its_name() -> None:
    files = {path.stem for path in (PACKAGE / "cli").glob("*.py")} - NOT_COMMANDS
    assert files == {command.replace("-", "_") for command in COMMANDS}
    for command in COMMANDS:
        name = command.replace("-", "_")
        assert getattr(import_module(f"raytrain_hpc.cli.{name}"), name).name == command


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_is_in_the_module_of_its_name(name: str) -> None:
    assert callable(import_module(f"raytrain_hpc.bench.{name}").run)


def test_blocking_files_are_where_ranks_wait() -> None:
    torch_file, fsdp_file, own_file = get_blocking_files()
    assert inspect.unwrap(dist.all_reduce).__code__.co_filename == torch_file
    assert inspect.unwrap(dist.broadcast).__code__.co_filename == torch_file
    assert wait_all.__code__.co_filename == own_file
    assert "def foreach_reduce(" in Path(fsdp_file).read_text()


def test_preloaded_modules_exist() -> None:
    assert all(find_spec(module) for module in PRELOADED_MODULES)


def test_files_of_serial_tests_exist() -> None:
    assert not [name for name in SERIAL_TESTS if not (TESTS / f"{name}.py").is_file()]


def test_package_data_exists() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["raytrain_hpc"]
    assert data
    assert not [pattern for pattern in data if not list(PACKAGE.glob(pattern))]


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")], ids=str)
def test_links_and_modules_named_in_documents_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
    if page.name == "CHANGELOG.md":  # the history names files that no longer exist
        return
    modules = re.findall(r"python -m (tests[\w.]+)", text)
    assert not [module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").is_file()]


def test_architecture_names_files_that_exist_and_answers_forty_questions() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    files = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text)) - {"cli/COMMAND.py"}
    assert not [name for name in files if not (PACKAGE / name).exists() and not (ROOT / name).exists()]
    assert len(re.findall(r"^\| [A-Z][^|]*\? \| `", text, re.MULTILINE)) >= 40
