"""Staging directory in which a dataset is prepared. A killed `prepare` is resumed from it.

.NAME.preparing/lock          held during preparation; other processes wait
.NAME.preparing/plan.json     inputs and settings of the preparation
.NAME.preparing/tokenizer.json
.NAME.preparing/chunks/       encoded input partitions (see chunks.py)
.NAME.preparing/shards.jsonl  complete shards, one per line
.NAME.preparing/dataset/      shards, finally the manifest; then renamed to NAME
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrain_hpc.data.dataset.manifest import MANIFEST_FILE, Manifest, Shard
from raytrain_hpc.data.preprocess.chunks import write_json_atomically


class StagingDirectory:
    """Staging directory of one target. Methods raise OSError if writing fails."""

    def __init__(self, out: Path):
        self.out = Path(os.path.realpath(out))  # Path(".") has no name, and a link to a directory cannot be replaced
        self.path = self.out.parent / f".{self.out.name}.preparing"
        self.chunks_dir, self.dataset_dir = self.path / "chunks", self.path / "dataset"
        self.tokenizer_path = self.path / "tokenizer.json"
        self._plan_path, self._shards_path = self.path / "plan.json", self.path / "shards.jsonl"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the exclusive lock on the target inside the context; wait for it first. Released if the process dies."""
        descriptor = self._acquire_lock()
        try:
            yield
        finally:
            os.close(descriptor)

    def _acquire_lock(self) -> int:
        while True:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
            except FileNotFoundError:  # removed since mkdir
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path / "lock")):
                    return descriptor
            except FileNotFoundError:  # the previous holder finished and removed the directory
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def initialize(self, plan: dict[str, Any]) -> None:
        """Keep the contents if they belong to this plan; otherwise clear them."""
        plan = json.loads(json.dumps(plan))
        if self._read_json(self._plan_path) != plan:
            for path in (self._plan_path, self._shards_path, self.tokenizer_path):
                path.unlink(missing_ok=True)
            for path in (self.chunks_dir, self.dataset_dir):
                shutil.rmtree(path, ignore_errors=True)
            write_json_atomically(self._plan_path, plan)
        self.chunks_dir.mkdir(exist_ok=True)
        self.dataset_dir.mkdir(exist_ok=True)

    def read_tokenizer(self) -> dict[str, Any] | None:
        """Read the stored tokenizer as JSON values; None if there is none."""
        data: dict[str, Any] | None = self._read_json(self.tokenizer_path)
        return data

    def load_finished_shards(self) -> dict[str, list[Shard]]:
        """Load the complete shards per split, in order, and remove all other files."""
        shards: dict[str, list[Shard]] = {}
        text = self._shards_path.read_text() if self._shards_path.exists() else ""
        complete, newline, incomplete = text.rpartition("\n")
        if incomplete:  # the process was killed while it wrote the last line
            partial = self._shards_path.with_suffix(".partial")
            partial.write_text(complete + newline)
            partial.replace(self._shards_path)
        for line in complete.splitlines():
            split, shard = json.loads(line)
            shards.setdefault(split, []).append(Shard(**shard))
        known = {shard.file for split_shards in shards.values() for shard in split_shards}
        for path in self.dataset_dir.iterdir():
            if path.name not in known:
                path.unlink()
        return shards

    def record_shard(self, split: str, shard: Shard) -> None:
        """Record a complete shard durably. Its chunks may be removed afterwards."""
        with self._shards_path.open("a") as file:
            file.write(_format_shard_line(split, shard))
            file.flush()
            os.fsync(file.fileno())

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, rename the dataset to its target, and remove the staging directory."""
        with (self.dataset_dir / MANIFEST_FILE).open("x", encoding="utf-8") as file:
            file.write(json.dumps(manifest.to_json(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(self.dataset_dir)
        self.dataset_dir.rename(self.out)  # fails if a non-empty directory has appeared there
        _sync_directory(self.out.parent)
        self.remove()

    def remove(self) -> None:
        """Remove all contents, the lock file last: afterwards another process may start in the directory."""
        for path in (self.chunks_dir, self.dataset_dir):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.path.iterdir():
            if path.name != "lock" and not path.is_dir():
                path.unlink(missing_ok=True)
        (self.path / "lock").unlink(missing_ok=True)
        with suppress(OSError):  # another process is using it already
            self.path.rmdir()

    @staticmethod
    def _read_json(path: Path) -> Any:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _format_shard_line(split: str, shard: Shard) -> str:
    return json.dumps([split, asdict(shard)]) + "\n"


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
