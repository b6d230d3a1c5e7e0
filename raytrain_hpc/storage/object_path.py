"""Objects of a bucket under the names that `pathlib` uses for files, as far as an object store has the operation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from raytrain_hpc.storage.object_client import URL_SCHEMES, open_bucket, translate_errors

_PART_BYTES = 8 * 2**20
_MAX_PARTS = 10_000  # of a multipart upload, by S3
_CONCURRENT_PARTS = 8


@dataclass(frozen=True)
class Version:
    """The version of an object that was read or written, for a conditional write."""

    e_tag: str | None
    version: str | None

    def to_condition(self) -> dict[str, str]:
        """Return the condition that the object still has this version, in obstore's words."""
        return {key: value for key, value in (("e_tag", self.e_tag), ("version", self.version)) if value is not None}


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing: its size in bytes and the Unix time of its last change, by the server's clock."""

    path: ObjectPath
    bytes: int
    modified: float


@dataclass(frozen=True)
class ObjectPath:
    """An object, or a prefix of objects, of a bucket: s3://BUCKET/KEY, gs://BUCKET/KEY or az://CONTAINER/KEY.

    Picklable: each process opens its own connection. An object is written completely or not at all, and is seen by all
    readers at once. Every method that talks to the store raises OSError (`object_client.translate_errors`).
    """

    scheme: str
    bucket: str
    key: str

    @classmethod
    def from_url(cls, url: str) -> ObjectPath:
        """Parse a URL. Raises ValueError if it has another scheme, no bucket, or an empty or relative part."""
        scheme, separator, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        if scheme not in URL_SCHEMES or not separator:
            raise ValueError(f"needs one of {', '.join(f'{known}://' for known in URL_SCHEMES)}")
        parts = key.rstrip("/").split("/") if key.rstrip("/") else []
        if not bucket or any(part in ("", ".", "..") for part in parts) or set("?#") & set(key):
            raise ValueError(f"needs the form {scheme}://BUCKET/PATH")
        return cls(scheme, bucket, "/".join(parts))

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(self.scheme, self.bucket, f"{self.key}/{name}".strip("/"))

    @property
    def name(self) -> str:
        """The part after the last slash."""
        return self.key.rpartition("/")[2]

    def get_size(self) -> int:
        """Return the size in bytes."""
        return self._get_info().bytes

    def get_modified_time(self) -> float:
        """Return the Unix time of the last change, by the server's clock."""
        return self._get_info().modified

    def _get_info(self) -> ObjectInfo:
        import obstore

        with translate_errors(str(self)):
            return self._to_info(obstore.head(self._bucket_store, self.key))

    def is_file(self) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.get_size()
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self) -> bytes:
        """Return the content."""
        return self.read_with_version()[0]

    def read_with_version(self) -> tuple[bytes, Version]:
        """Return the content and its version."""
        import obstore

        with translate_errors(str(self)):
            result = obstore.get(self._bucket_store, self.key)
            return bytes(result.bytes()), _get_version(result.meta)

    def read_range(self, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` to before `stop`; fewer if the object is shorter."""
        import obstore

        if stop <= start:
            return memoryview(b"")
        with translate_errors(str(self)):
            return memoryview(obstore.get_range(self._bucket_store, self.key, start=start, end=stop))

    def write_bytes(self, content: bytes) -> Version:
        """Write the object, replacing an earlier one."""
        return self._put(content, "overwrite")

    def create(self, content: bytes) -> Version:
        """Write the object if there is none. Raises FileExistsError otherwise."""
        return self._put(content, "create")

    def replace(self, content: bytes, version: Version) -> Version:
        """Write the object if it still has this version. Raises FileExistsError otherwise."""
        return self._put(content, version.to_condition())

    def _put(self, content: bytes, mode: Any) -> Version:
        import obstore

        with translate_errors(str(self)):
            return _get_version(obstore.put(self._bucket_store, self.key, content, mode=mode, use_multipart=False))

    def upload(self, chunks: Iterable[memoryview | bytes], total_bytes: int) -> None:
        """Write the object from pieces of content of `total_bytes` together, if large as parts uploaded in parallel.

        Memory use is bounded by a few parts of at least 8 MiB. If `chunks` or the store raises, the upload is aborted.
        """
        if total_bytes <= _PART_BYTES:
            self.write_bytes(b"".join(chunks))
            return
        try:
            self._upload_parts(chunks, max(_PART_BYTES, -(-total_bytes // _MAX_PARTS)))
        except FileNotFoundError:
            # The answer to the completion was lost, and the upload no longer exists when it is completed again.
            if self.get_size() != total_bytes:
                raise

    def _upload_parts(self, chunks: Iterable[memoryview | bytes], part_bytes: int) -> None:
        import obstore

        options: Any = {"chunk_size": part_bytes, "max_concurrency": _CONCURRENT_PARTS}
        with translate_errors(str(self)):
            obstore.put(self._bucket_store, self.key, iter(chunks), use_multipart=True, **options)

    def list_directory(self) -> tuple[list[str], list[ObjectInfo]]:
        """Return the names of the prefixes directly below this one, and the objects there.

        Some stores and tools mark a directory by an empty object of its name; that of this one is left out. A directory
        can be listed that holds nothing else.
        """
        import obstore

        with translate_errors(str(self)):
            listing = obstore.list_with_delimiter(self._bucket_store, f"{self.key}/" if self.key else None)
        prefixes = sorted(prefix.rstrip("/").rpartition("/")[2] for prefix in listing["common_prefixes"])
        return prefixes, [self._to_info(entry) for entry in listing["objects"] if entry["path"] != self.key]

    def list_recursively(self) -> Iterator[ObjectInfo]:
        """Yield all objects below this prefix."""
        import obstore

        with translate_errors(str(self)):
            for chunk in obstore.list(self._bucket_store, f"{self.key}/" if self.key else None):
                yield from (self._to_info(entry) for entry in chunk if entry["path"] != self.key)

    def delete(self) -> None:
        """Delete the object, if there is one."""
        self._delete([self.key])

    def delete_tree(self) -> None:
        """Delete all objects below this prefix."""
        self._delete([info.path.key for info in self.list_recursively()])

    def _delete(self, keys: list[str]) -> None:
        import obstore

        with translate_errors(str(self)):
            try:
                obstore.delete(self._bucket_store, keys)
            except FileNotFoundError:
                return  # stores other than S3 say so

    def _to_info(self, entry: Any) -> ObjectInfo:
        path = ObjectPath(self.scheme, self.bucket, entry["path"])
        return ObjectInfo(path, int(entry["size"]), entry["last_modified"].timestamp())

    @property
    def _bucket_store(self) -> Any:
        return open_bucket(self.scheme, self.bucket)


def _get_version(meta: Any) -> Version:
    return Version(meta.get("e_tag"), meta.get("version"))
