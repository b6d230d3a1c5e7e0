"""Small named objects that a run's driver and other processes exchange through the run directory."""

from __future__ import annotations

from raytrain_hpc.storage.location import Location, write_atomically


class Mailbox:
    """Store of small objects by name, in an existing directory or below a URL that all processes see.

    A reader sees an object whole or not at all.
    """

    def __init__(self, location: Location):
        self._location = location

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, or None if there is none. Raises OSError if it cannot be read."""
        try:
            return (self._location / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Create or replace an object in one step. Raises OSError if it cannot be written."""
        write_atomically(self._location / name, content)
