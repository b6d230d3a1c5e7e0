"""The rules of the house: which room may import which, what stays out of `plan`, how long things may get."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raytrain_hpc

HOUSE = Path(raytrain_hpc.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))

# Single files that belong to a room; every other room is a folder or a file of that name.
AT_HOME_IN = {
    "ray_address": "config",
    "script": "api",
    "cache_dir": "config",
    "text_generation": "api",
    "__main__": "cli",
    "__init__": "public",
}
# What each room may import besides itself, from the ground up. Nothing below a line knows what stands above it.
MAY_IMPORT = {
    "errors": "",
    "config": "errors",
    "planner": "errors config",
    "elastic": "errors config planner",
    "state": "errors",
    "model": "errors config state",
    "parallel": "errors config planner state model",
    "snapshot": "errors state",
    "distributed": "errors config planner elastic state parallel snapshot",
    "data": "errors config",
    "runtime": "errors config planner elastic state parallel distributed data",
    "checkpoint": "errors config state snapshot",
    "observability": "errors config planner",
    "optim": "errors config state",
    "training": "errors config planner elastic state model parallel snapshot distributed data runtime checkpoint "
    "observability optim",
    "worker": "errors config planner elastic state parallel snapshot distributed data runtime training",
    "driver": "errors config planner elastic state distributed data runtime checkpoint observability optim training "
    "worker",
    "run_report": "errors config driver",
    "api": "errors config planner elastic state model snapshot data runtime checkpoint observability training driver "
    "run_report",
    "huggingface": "errors config state data checkpoint",
    "bench": "errors config planner elastic state model snapshot data runtime checkpoint observability parallel "
    "training worker driver api",
    "cli": "errors config planner elastic state data checkpoint observability driver huggingface run_report api bench",
    "public": "errors config data driver huggingface run_report api",
}
NEITHER_TORCH_NOR_RAY = {"errors", "config", "planner", "elastic", "public"}


def room_of(module: str) -> str:
    """ "driver.workers" -> "driver"."""
    first = module.split(".")[0]
    return AT_HOME_IN.get(first, first)


def module_of(path: Path) -> str:
    """Dotted name below the package; the package itself is "__init__"."""
    parts = list(path.relative_to(HOUSE).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every module that a file names in an import, wherever in the file, with its line."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are written out from raytrain_hpc"
            yield str(node.module), node.lineno


def may_import_ray(module: str) -> bool:
    return (
        room_of(module) in ("driver", "bench")
        or module == "worker.actor"
        or module in ("data.loader.ray_loader", "data.preprocess.ray_executor")
    )


def test_every_file_has_a_room() -> None:
    assert {room_of(module_of(path)) for path in FILES} <= set(MAY_IMPORT)


def test_the_rule_has_no_circle() -> None:
    order = list(MAY_IMPORT)
    for room, others in MAY_IMPORT.items():
        assert all(order.index(other) < order.index(room) for other in others.split()), room


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_imports_run_one_way(path: Path) -> None:
    module = module_of(path)
    room, wrong = room_of(module), []
    for name, line in imports(path):
        top, _, rest = name.partition(".")
        if top == "raytrain_hpc":
            other = room_of(rest or "__init__")
            if other != room and other not in MAY_IMPORT[room].split():
                wrong.append(f"line {line}: {room} may not import {name}")
        if top == "ray" and not may_import_ray(module):
            wrong.append(
                f"line {line}: ray is imported in driver/, worker/actor.py, bench/ and the Ray backends of data/ alone"
            )
        if top in ("ray", "torch") and room in NEITHER_TORCH_NOR_RAY:
            wrong.append(f"line {line}: {room} must load without {top}")
    assert not wrong, f"{path}: {wrong}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: module_of(path))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_no_room_is_called_utils() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]


def loaded_after(code: str) -> tuple[float, set[str]]:
    """CPU seconds of `code` in a fresh Python, and the packages it left loaded."""
    report = "print(json.dumps([time.process_time() - began, sorted({name.split('.')[0] for name in sys.modules})]))"
    script = f"import json, sys, time\nbegan = time.process_time()\n{code}\n{report}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    seconds, packages = json.loads(done.stdout.splitlines()[-1])
    return seconds, set(packages)


def test_import_is_quick_and_loads_nothing_heavy() -> None:
    seconds, packages = loaded_after("import raytrain_hpc")
    assert seconds < 0.2
    assert not packages & {"torch", "ray", "numpy", "pyarrow", "omegaconf", "rich"}


def test_plan_loads_neither_torch_nor_ray() -> None:
    words = ["plan", "model.preset=llama3_8b", "--workers", "8"]
    call = f"from raytrain_hpc.cli.main import main\nmain({words}, standalone_mode=False)"
    seconds, packages = loaded_after(call)
    assert seconds < 1.5
    assert not packages & {"torch", "ray", "numpy", "pyarrow"}


def test_asking_for_a_wrong_setting_loads_neither() -> None:
    call = (
        "from raytrain_hpc.cli.main import main\n"
        "try: main(['train', 'train.lrr=1'])\n"
        "except SystemExit as end: assert end.code == 2"
    )
    _, packages = loaded_after(call)
    assert not packages & {"torch", "ray", "pyarrow"}
