"""The directory in which a dataset comes to be: what a killed `prepare` left there, the next one goes on with.

.NAME.preparing/lock          held while somebody prepares; whoever comes second waits
.NAME.preparing/plan.json     the inputs and settings that all of this belongs to
.NAME.preparing/tokenizer.json
.NAME.preparing/chunks/       encoded pieces of the input (see chunks.py)
.NAME.preparing/shards.jsonl  the shards that are complete, one a line
.NAME.preparing/dataset/      shards, at last the manifest; then renamed to NAME
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
    """The staging directory of one target. All methods raise OSError where the disk refuses."""

    def __init__(self, out: Path):
        self.out = Path(os.path.abspath(out))  # "." has no name and no parent of its own
        self.path = self.out.parent / f".{self.out.name}.preparing"
        self.chunks_dir, self.dataset_dir = self.path / "chunks", self.path / "dataset"
        self.tokenizer_path = self.path / "tokenizer.json"
        self._plan_path, self._shards_path = self.path / "plan.json", self.path / "shards.jsonl"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only one who prepares this target; waits for another one. The lock ends with the process."""
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
            except FileNotFoundError:  # removed between the two lines
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.path.samestat(os.fstat(descriptor), os.stat(self.path / "lock")):
                    return descriptor
            except FileNotFoundError:  # whoever held it was done, and removed the directory
                pass
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def initialize(self, plan: dict[str, Any]) -> None:
        """Keep what is there if it belongs to this plan; else start anew."""
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
        """The tokenizer that was stored, as JSON values; None where none was."""
        found: dict[str, Any] | None = self._read_json(self.tokenizer_path)
        return found

    def load_finished_shards(self) -> dict[str, list[Shard]]:
        """The complete shards of each split, in order. Files that are not among them are removed."""
        shards: dict[str, list[Shard]] = {}
        text = self._shards_path.read_text() if self._shards_path.exists() else ""
        whole, newline, rest = text.rpartition("\n")
        if rest:  # a line that was not written to its end
            partial = self._shards_path.with_suffix(".partial")
            partial.write_text(whole + newline)
            partial.replace(self._shards_path)
        for line in whole.splitlines():
            split, shard = json.loads(line)
            shards.setdefault(split, []).append(Shard(**shard))
        known = {shard.file for some in shards.values() for shard in some}
        for path in self.dataset_dir.iterdir():
            if path.name not in known:
                path.unlink()
        return shards

    def record_shard(self, split: str, shard: Shard) -> None:
        """Note that a shard is complete. From then on the chunks it was made of may go."""
        with self._shards_path.open("a") as file:
            file.write(_format_shard_line(split, shard))
            file.flush()
            os.fsync(file.fileno())

    def publish(self, manifest: Manifest) -> None:
        """Make the dataset appear under its name, and remove what it was made of."""
        with (self.dataset_dir / MANIFEST_FILE).open("x", encoding="utf-8") as file:
            file.write(json.dumps(manifest.to_json(), indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _sync_directory(self.dataset_dir)
        self.dataset_dir.rename(self.out)  # fails where a directory that is not empty has come up in the meantime
        _sync_directory(self.out.parent)
        self.remove()

    def remove(self) -> None:
        """Give up everything. The lock goes last: from then on another one may begin here, and nothing is touched."""
        for path in (self.chunks_dir, self.dataset_dir):
            shutil.rmtree(path, ignore_errors=True)
        for path in self.path.iterdir():
            if path.name != "lock" and not path.is_dir():
                path.unlink(missing_ok=True)
        (self.path / "lock").unlink(missing_ok=True)
        with suppress(OSError):  # somebody else is in it already
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
