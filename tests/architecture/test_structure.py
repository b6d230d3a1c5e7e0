"""Architecture rules: which package may import which, which modules load without torch and Ray, limits of size."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raytrain_hpc

PACKAGE_ROOT = Path(raytrain_hpc.__file__).parent
FILES = sorted(PACKAGE_ROOT.rglob("*.py"))

# The package that a top-level file counts as; every other top-level file or folder is a package of its own.
PACKAGE_OF_FILE = {
    "ray_address": "config",
    "ray_temp_dir": "config",
    "script": "api",
    "script_loader": "api",
    "cache_dir": "config",
    "cpu_limits": "config",
    "checkpoint_weights": "api",
    "text_generation": "api",
    "__main__": "cli",
    "__init__": "public",
}
# The packages that each package may import besides itself, in import order: only packages listed above it.
ALLOWED_IMPORTS = {
    "errors": "",
    "device_backends": "",
    "torch_device": "device_backends",
    "nvml": "",
    "torch_private": "",
    "torch_private_fsdp": "",
    "torch_private_groups": "",
    "background_thread": "",
    "ray_private": "",
    "storage": "errors background_thread",
    "config": "errors device_backends storage",
    "callbacks": "errors torch_device storage torch_private config",
    "planner": "errors device_backends config",
    "elastic": "errors device_backends config planner",
    "state": "errors torch_device torch_private",
    "model": "errors torch_device torch_private config state",
    "parallel": "errors torch_device torch_private torch_private_fsdp config planner state model",
    "snapshot": "errors state",
    "distributed": "errors device_backends torch_device callbacks torch_private torch_private_groups config planner "
    "elastic state parallel snapshot",
    "data": "errors storage ray_private torch_private config",
    "runtime": "errors torch_device storage callbacks torch_private config planner elastic state parallel snapshot "
    "distributed data",
    "checkpoint": "errors background_thread storage config state snapshot",
    "observability": "errors device_backends storage callbacks config planner",
    "optim": "errors torch_device torch_private config state",
    "training": "errors torch_device storage callbacks torch_private config planner elastic state model parallel "
    "snapshot distributed data runtime checkpoint observability optim",
    "worker": "errors device_backends torch_device nvml storage config planner elastic state parallel snapshot "
    "distributed data runtime checkpoint training",
    "driver": "errors device_backends torch_device nvml background_thread storage callbacks ray_private config planner "
    "elastic state snapshot distributed data runtime checkpoint observability optim training worker",
    "run_report": "errors storage config observability driver",
    "api": "errors storage callbacks config planner elastic state model snapshot data runtime "
    "checkpoint observability training driver run_report",
    "huggingface": "errors storage config state data checkpoint driver",
    "dcp": "errors torch_private config state data huggingface",
    "bench": "errors device_backends torch_device background_thread storage callbacks ray_private "
    "torch_private_groups config planner elastic state model snapshot data runtime checkpoint "
    "observability parallel training worker driver api huggingface",
    "sweeps": "errors storage ray_private config observability checkpoint driver run_report api",
    "cli": "errors device_backends storage config planner elastic state data checkpoint observability driver "
    "huggingface dcp run_report api bench sweeps",
    "public": "errors callbacks config data driver huggingface dcp run_report api sweeps",
}
WITHOUT_TORCH_AND_RAY = {"errors", "device_backends", "config", "planner", "elastic", "public"}


def get_package(module: str) -> str:
    """Return the package of a module: "driver.supervisor" -> "driver"."""
    first = module.split(".")[0]
    return PACKAGE_OF_FILE.get(first, first)


def get_module(path: Path) -> str:
    """Return the dotted module name below raytrain_hpc; "__init__" for raytrain_hpc itself."""
    parts = list(path.relative_to(PACKAGE_ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def iter_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the module and the line of every import in a file, including those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports must be absolute"
            yield str(node.module), node.lineno


def may_import_ray(module: str) -> bool:
    """Return whether a module is one of those that may import Ray."""
    return (
        get_package(module) in ("driver", "bench")
        or module in ("worker.actor", "ray_private")
        or module in ("data.loader.ray_loader", "data.preprocess.ray_executor", "data.samples.ray_data_rows")
    )


def test_every_file_belongs_to_a_known_package() -> None:
    assert {get_package(get_module(path)) for path in FILES} <= set(ALLOWED_IMPORTS)


def test_allowed_imports_have_no_cycle() -> None:
    order = list(ALLOWED_IMPORTS)
    for package, allowed in ALLOWED_IMPORTS.items():
        assert all(order.index(imported) < order.index(package) for imported in allowed.split()), package


@pytest.mark.parametrize("path", FILES, ids=lambda path: get_module(path))
def test_a_module_imports_only_allowed_packages(path: Path) -> None:
    module = get_module(path)
    package, violations = get_package(module), []
    for name, line in iter_imports(path):
        top, _, rest = name.partition(".")
        if top == "raytrain_hpc":
            imported = get_package(rest or "__init__")
            if imported != package and imported not in ALLOWED_IMPORTS[package].split():
                violations.append(f"line {line}: {package} may not import {name}")
        if top == "ray" and not may_import_ray(module):
            violations.append(
                f"line {line}: only driver/, worker/actor.py, bench/ and the Ray backends of data/ may import ray"
            )
        if top in ("ray", "torch") and package in WITHOUT_TORCH_AND_RAY:
            violations.append(f"line {line}: {package} must not import {top}")
    assert not violations, f"{path}: {violations}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: get_module(path))
def test_files_and_functions_are_within_the_length_limits(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_no_module_is_named_utils() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def run_and_list_packages(code: str) -> tuple[float, set[str]]:
    """Run `code` in a new Python process. Return its CPU seconds and the top-level packages that it imported."""
    report = "print(json.dumps([time.process_time() - start, sorted({name.split('.')[0] for name in sys.modules})]))"
    script = f"import json, sys, time\nstart = time.process_time()\n{code}\n{report}"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    seconds, packages = json.loads(process.stdout.splitlines()[-1])
    return seconds, set(packages)


def test_import_is_fast_and_loads_no_heavy_package() -> None:
    seconds, packages = run_and_list_packages("import raytrain_hpc")
    assert seconds < 0.2
    assert not packages & {"torch", "ray", "numpy", "pyarrow", "omegaconf", "rich"}


def test_plan_loads_neither_torch_nor_ray() -> None:
    arguments = ["plan", "model.preset=llama3_8b", "--workers", "8"]
    call = f"from raytrain_hpc.cli.main import main\nmain({arguments}, standalone_mode=False)"
    seconds, packages = run_and_list_packages(call)
    assert seconds < 1.5
    assert not packages & {"torch", "ray", "numpy", "pyarrow"}


def test_an_unknown_setting_is_reported_without_loading_torch_or_ray() -> None:
    call = (
        "from raytrain_hpc.cli.main import main\n"
        "try: main(['train', 'train.lrr=1'])\n"
        "except SystemExit as end: assert end.code == 2"
    )
    _, packages = run_and_list_packages(call)
    assert not packages & {"torch", "ray", "pyarrow"}


def list_words_of_code(path: Path) -> set[str]:
    """Return the names and the words of strings in a file, without comments and docstrings, in lower case."""
    tree, words = ast.parse(path.read_text()), []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, documented) and is_documented(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            words.append(node.attr)
        elif isinstance(node, ast.Name):
            words.append(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            words += re.split(r"[^A-Za-z0-9]+", node.value)
    return {part for word in words for part in word.lower().split("_")}


def is_documented(node: Any) -> bool:
    return ast.get_docstring(node) is not None


KINDS_OF_DEVICES = {"cuda", "nccl", "rocm", "rccl", "xpu", "xccl", "hip"}
NAMING_FILES = {"device_backends", "torch_device", "torch_private", "torch_private_fsdp", "torch_private_groups"}
# The help of a key; a GPU of NVIDIA is measured through its library, and peers of benchmarks are programs for it.
NAMING_PARTS = {
    "config.cluster_config": {"cuda", "xpu"},
    "bench.telemetry": {"cuda"},
    "bench.snapshots": {"cuda"},
    "bench.torch_baseline": {"cuda", "nccl"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: get_module(path))
def test_kinds_of_devices_are_named_in_their_files_only(path: Path) -> None:
    named = list_words_of_code(path) & KINDS_OF_DEVICES
    module = get_module(path)
    assert module in NAMING_FILES or named == NAMING_PARTS.get(module, set())
