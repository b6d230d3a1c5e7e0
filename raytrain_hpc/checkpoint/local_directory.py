"""A run's checkpoints in node-local storage: written, verified and deleted by the processes of the node.

    LOCAL_DIR/demo-3f2a91c07b54/step-00000100-g3/rank-00000.safetensors    written by a rank of generation 3

A node holds the files of its own ranks only. Their manifest is in the catalog of the run directory (local_catalog.py).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from raytrain_hpc.checkpoint.checksum import FileChecksum
from raytrain_hpc.checkpoint.retention import select_kept_steps
from raytrain_hpc.checkpoint.verification import find_file_problem, find_size_problem
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.storage.location import make_absolute

_NAME_PATTERN = re.compile(r"step-(\d+)-g(\d+)")
_DIGEST_DIGITS = 12
_THREADS = 4  # that verify files of a node


def get_local_name(step: int, generation: int) -> str:
    """Return the name of the directory into which a generation writes the checkpoint of `step`."""
    return f"step-{step:08d}-g{generation}"


def parse_local_name(name: str) -> tuple[int, int] | None:
    """Return step and generation of a directory, or None if its name is not that of a checkpoint."""
    match = _NAME_PATTERN.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


class LocalDirectory:
    """The checkpoints of one run on this node. No other run uses its directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def open(cls, config: Config) -> LocalDirectory:
        """Return the directory that `checkpoint.local_dir` and `run.dir` stand for on this node. Creates nothing.

        Raises CheckpointError if a variable in `checkpoint.local_dir` is not set on this node.
        """
        local_dir = config.checkpoint.local_dir
        path = os.path.expandvars(os.path.expanduser(local_dir))
        if "$" in path or not os.path.isabs(path):
            raise CheckpointError(
                f"checkpoint.local_dir={local_dir}: is {path} on node {os.uname().nodename}, not an absolute path; set "
                "the variable on all nodes, or give a path"
            )
        run_dir = make_absolute(config.run.dir)
        digest = hashlib.sha256(run_dir.encode()).hexdigest()[:_DIGEST_DIGITS]
        return cls(Path(path) / f"{run_dir.rstrip('/').rpartition('/')[2]}-{digest}")

    def create(self, step: int, generation: int) -> Path:
        """Create the directory of a checkpoint, unless another rank has, and return it. Raises OSError."""
        path = self.root / get_local_name(step, generation)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def check_files(self, name: str, files: Mapping[str, FileChecksum], *, read: bool) -> dict[str, str]:
        """Return the problem of each file that the checkpoint `name` has on this node; "" if there is none.

        `read`: compare the whole content with the checksum, and not only the size.
        """
        path, find_problem = self.root / name, find_file_problem if read else _find_size_problem
        present = [file for file in files if (path / file).exists()]
        with ThreadPoolExecutor(_THREADS) as pool:
            problems = pool.map(find_problem, (path / file for file in present), (files[file] for file in present))
            return {file: problem or "" for file, problem in zip(present, problems, strict=True)}

    def prune(self, step: int, keep: int, fallback_steps: Collection[int] = ()) -> None:
        """Delete the checkpoints of this node that are older than the newest `keep` ones before `step`.

        For each of `fallback_steps`, the newest one that is not newer is kept too. Call when that of `step` begins to
        be written. A file that is being uploaded stays open until it is.
        """
        by_step: dict[int, list[Path]] = {}
        for path, (known_step, _) in self._list().items():
            if known_step < step:
                by_step.setdefault(known_step, []).append(path)
        for old_step in by_step.keys() - select_kept_steps(by_step, keep, fallback_steps):
            _remove(by_step[old_step])

    def remove_leftovers(self, kept_names: Collection[str], generation: int) -> None:
        """Delete checkpoints of generations before `generation` that the catalog does not list, such as partial ones.

        Call at the start of a generation.
        """
        _remove(path for path, (_, of) in self._list().items() if of < generation and path.name not in kept_names)

    def remove(self) -> None:
        """Delete all checkpoints of the run on this node. Call when they are no longer needed."""
        shutil.rmtree(self.root, ignore_errors=True)

    def list_names(self) -> list[str]:
        """Return the names of the checkpoints of which this node has files, in no order."""
        return [path.name for path in self._list()]

    def _list(self) -> dict[Path, tuple[int, int]]:
        """Return step and generation of each checkpoint directory on this node."""
        with suppress(OSError):
            parsed = {path: parse_local_name(path.name) for path in self.root.iterdir()}
            return {path: name for path, name in parsed.items() if name is not None}
        return {}


def has_local_files(config: Config) -> bool:
    """Return whether this node has files of the run's checkpoints, complete or not. Raises as `LocalDirectory.open`."""
    return bool(config.checkpoint.local_dir and LocalDirectory.open(config).list_names())


def _find_size_problem(path: Path, checksum: FileChecksum) -> str | None:
    return find_size_problem(path, checksum.bytes)


def _remove(paths: Iterable[Path]) -> None:
    """Delete directories; several ranks of a node may do so at once. What cannot be deleted is tried again later."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)
