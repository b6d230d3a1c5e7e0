"""Checksums of checkpoint files: a fast hash of the whole file, and one of each block, to verify reads of a part.

xxh3 detects damage at memory speed: one core computes both hashes at more than 3 GB/s, sha256 at about 1. It does not
protect against a writer who forges a checkpoint, who could replace the manifest as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

ALGORITHM = "xxh3_128"
_HASHES: dict[str, Callable[[], Any]] = {ALGORITHM: xxhash.xxh3_128, "sha256": hashlib.sha256}
_BLOCK_BYTES = 4 * 2**20
_BLOCK_DIGITS = 16  # hex digits of an xxh3_64


@dataclass(frozen=True)
class FileChecksum:
    """The expected length in bytes and checksum of a file.

    `digest` is the hex digest of the whole file by `algorithm`. `block_digests` are the hex xxh3_64 of its blocks of
    `block_bytes`, of which the last may be shorter, joined to one string; empty in manifests that used sha256.
    """

    bytes: int
    algorithm: str
    digest: str
    block_bytes: int = 0
    block_digests: str = ""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FileChecksum:
        """Build a checksum from its entry in a manifest. Raises KeyError, TypeError or ValueError if malformed."""
        if "sha256" in data:  # format raytrain-hpc-1
            return cls(int(data["bytes"]), "sha256", str(data["sha256"]))
        checksum = cls(
            int(data["bytes"]),
            str(data["algorithm"]),
            str(data["digest"]),
            int(data["block_bytes"]),
            str(data["block_digests"]),
        )
        if checksum.algorithm not in _HASHES:
            raise ValueError(f"unknown checksum algorithm {checksum.algorithm!r}")
        if checksum.block_bytes <= 0 or len(checksum.block_digests) != checksum.num_blocks * _BLOCK_DIGITS:
            raise ValueError("the number of block digests does not match the length of the file")
        return checksum

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the file."""
        return -(-self.bytes // self.block_bytes)

    def matches_block(self, number: int, content: memoryview) -> bool:
        """Return whether `content` is that of block `number`."""
        expected = self.block_digests[number * _BLOCK_DIGITS : (number + 1) * _BLOCK_DIGITS]
        return bool(xxhash.xxh3_64(content).hexdigest() == expected)


class ChecksumBuilder:
    """Builder of the checksum of a file from its content, given piece by piece in order."""

    def __init__(self, algorithm: str = ALGORITHM) -> None:
        """Start with an empty file. Raises KeyError for an algorithm that no manifest names."""
        self._algorithm, self._hash = algorithm, _HASHES[algorithm]()
        self._bytes, self._block, self._block_digests = 0, xxhash.xxh3_64(), [""]

    def update(self, content: memoryview | bytes) -> None:
        """Add the next piece of content. Releases the interpreter lock while hashing."""
        self._hash.update(content)
        view = memoryview(content)
        while view:
            room = _BLOCK_BYTES - self._bytes % _BLOCK_BYTES
            piece, view = view[:room], view[room:]
            self._block.update(piece)
            self._bytes += len(piece)
            if len(piece) == room:
                self._finish_block()

    def finish(self) -> FileChecksum:
        """Return the checksum of all content. Call once."""
        if self._bytes % _BLOCK_BYTES:
            self._finish_block()
        return FileChecksum(
            self._bytes, self._algorithm, self._hash.hexdigest(), _BLOCK_BYTES, "".join(self._block_digests)
        )

    def _finish_block(self) -> None:
        self._block_digests.append(self._block.hexdigest())
        self._block.reset()
