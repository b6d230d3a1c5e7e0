"""Small named objects that a run's driver and other processes exchange through the run directory."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from typing import Protocol


class Mailbox(Protocol):
    """Store of small objects by name. A reader sees an object whole or not at all.

    Files of a directory are one; objects of a bucket, which are replaced as a whole, can be another.
    """

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, or None if there is none. Raises OSError if storage fails."""

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object. Raises OSError if storage fails."""


class DirectoryMailbox:
    """Mailbox in an existing directory that all processes see."""

    def __init__(self, directory: Path):
        self._directory = directory

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or None if there is none. Raises OSError if it cannot be read."""
        try:
            return (self._directory / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Create or replace a file in one step. Raises OSError if it cannot be written."""
        temporary = self._directory / f".{name}.{secrets.token_hex(4)}"
        try:
            temporary.write_bytes(content)
            os.replace(temporary, self._directory / name)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
