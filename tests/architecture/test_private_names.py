"""Private names of torch and Ray are used in torch_private.py and ray_private.py alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import raytrain_hpc

PACKAGE_ROOT = Path(raytrain_hpc.__file__).parent
FILES = [
    path
    for path in sorted(PACKAGE_ROOT.rglob("*.py"))
    if path.name not in ("torch_private.py", "torch_private_fsdp.py", "torch_private_groups.py", "ray_private.py")
]
OF_THE_STANDARD_LIBRARY = {"_replace", "_fields", "_exit", "_current_frames"}
# Without an underscore, but not in the documentation.
UNDOCUMENTED = {"SAC_IGNORED_OPS", "split_factor", "torch.optim.adamw", "torch.optim.sgd", "working_dir_files"}
PRIVATE_IN_STRING = re.compile(r"\b(torch|ray)(\.\w+)*\._[a-z]|^RAY_[a-z]")


def is_private(name: str) -> bool:
    """Return whether a name or one part of a dotted name is private or undocumented. `__dunder__` is neither."""
    parts = name.split(".")
    return name in UNDOCUMENTED or any(
        part in UNDOCUMENTED or (part.startswith("_") and not part.startswith("__")) for part in parts
    )


def list_own_names(tree: ast.Module) -> set[str]:
    """Return the names that a file itself defines: functions, classes, variables, parameters and attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def iter_private_names(source: str) -> Iterator[str]:
    """Yield the private names of other packages in a file."""
    tree = ast.parse(source)
    permitted = list_own_names(tree) | OF_THE_STANDARD_LIBRARY
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not str(node.module).startswith(("raytrain_hpc", "__future__")):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [str(node.module), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Attribute) and not is_own(node.value):
            root = re.match(r"(torch|dist|ray)\.[\w.]+$", ast.unparse(node))
            names = [root[0] if root else node.attr]
        elif isinstance(node, ast.keyword) and node.arg:
            names = [node.arg]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            names = [str(argument.value) for argument in node.args[1:2] if isinstance(argument, ast.Constant)]
        elif isinstance(node, ast.Constant) and (
            PRIVATE_IN_STRING.search(str(node.value)) or str(node.value) in UNDOCUMENTED
        ):
            yield str(node.value)
        yield from (name for name in names if is_private(name) and name not in permitted)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE_ROOT)))
def test_a_file_uses_no_private_name_of_another_package(path: Path) -> None:
    assert not list(iter_private_names(path.read_text()))


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C._distributed_c10d import TCPStore",
        "from torch.utils.checkpoint import SAC_IGNORED_OPS",
        "from torch.optim.adamw import adamw",
        "torch._foreach_norm(x)",
        "torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)",
        "dist.distributed_c10d._world",
        "state._fsdp_param_groups",
        "getattr(state, '_fsdp_param_groups')",
        "getattr(placement, 'split_factor', 1)",
        "import ray._private.state",
        "ray._private.worker._global_node",
        "ray.init(_temp_dir='/x')",
        "logging.getLogger('ray._private.worker')",
        "'working_dir_files' in path.parts",
        "os.environ['RAY_worker_niceness'] = '0'",
    ],
)
def test_private_names_are_found(source: str) -> None:
    assert list(iter_private_names(source))


@pytest.mark.parametrize(
    "source",
    [
        "self._count = torch.zeros(1)",
        "def _run(_key): return other._run, os._exit, row._replace(a=1)",
        "torch.__version__",
        "'RAY_ADDRESS and ray.init'",
        "torch.cuda.get_device_properties(self._device).total_memory",
    ],
)
def test_other_names_are_not(source: str) -> None:
    assert not list(iter_private_names(source))
