"""Reader of `.metadata`, the pickle that describes a DCP directory. No code of the pickle is executed.

A pickle names the functions and classes that build its objects. This reader knows the names that torch writes and
replaces each by an inert record; any other name is refused before anything is built.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from raytrain_hpc.errors import CheckpointError
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.torch_private import list_dcp_classes

METADATA_FILE = ".metadata"
_DTYPES = """
    float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex128 complex64 complex32
    int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool
"""
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_PICKLE_ERRORS = (
    *(pickle.UnpicklingError, EOFError, RecursionError, MemoryError),
    *(ValueError, TypeError, AttributeError, LookupError, ArithmeticError),
)


@dataclass(frozen=True)
class DcpChunk:
    """A chunk of a tensor: its box in global coordinates, and the bytes of `file` that torch.save wrote for it."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class DcpTensor:
    """A tensor of the directory: its name there, global shape, name of its dtype in torch, and chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[DcpChunk, ...]


@dataclass(frozen=True)
class DcpMetadata:
    """The content of a DCP directory: tensors by name, and the names of pickled objects, which are never opened."""

    tensors: Mapping[str, DcpTensor]
    objects: tuple[str, ...]


def read_metadata(directory: Path) -> DcpMetadata:
    """Read `.metadata` of a DCP directory. The files with tensors are not opened.

    Raises CheckpointError if there is none, if it names a class that torch does not write, or if it is malformed.
    """
    path = directory / METADATA_FILE
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}; {_suggest_directory(directory)}") from error
    try:
        return _parse(_MetadataUnpickler(path, content).load())
    except _PICKLE_ERRORS as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{path}: is not the metadata of a torch.distributed.checkpoint: {reason}") from error


def _suggest_directory(directory: Path) -> str:
    """Return the remedy if `directory` has no `.metadata`: a directory below it that has one, if there is one."""
    found = sorted(directory.glob(f"*/{METADATA_FILE}"), key=lambda path: path.stat().st_mtime)
    if found:
        return f"give the directory of one step, for example {found[-1].parent}"
    if any(directory.glob(f"__*{METADATA_FILE}")):
        return "its ranks have saved without coordination; save it again with coordination"
    if any(directory.glob("*.safetensors")):
        return "it holds safetensors files; with a config.json, `raytrain-hpc import-hf` imports them"
    return "give a directory that torch.distributed.checkpoint.save has written"


class _Record:
    """An object of the pickle: the arguments of its class, and its state, both as plain data."""

    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexRecord(_Record):
    """Key of a chunk: the name of its tensor, and its offsets. Hashable, as keys are while a pickle is read."""

    @property
    def key(self) -> tuple[str, tuple[int, ...] | None]:
        """Name of the tensor and offsets of the chunk; None instead of offsets for a pickled object."""
        offset = self.state.get("offset")
        return self.state["fqn"], None if offset is None else tuple(offset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IndexRecord) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class _EnumRecord(_Record):
    """Member of an enumeration, which some versions of Python write as an attribute of its class."""


def _get_member(owner: Any, name: Any) -> _Record:
    """Return a record of an enumeration's member. Replaces `getattr`; raises ValueError for any other owner."""
    if owner is not _EnumRecord or not isinstance(name, str):
        raise ValueError("it reads an attribute of something else than an enumeration")
    return _EnumRecord(name)


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickler that builds records, tuples and dicts only."""

    def __init__(self, path: Path, content: bytes):
        super().__init__(BytesIO(content))
        self._path = path
        special = {"MetadataIndex": _IndexRecord, "_MEM_FORMAT_ENCODING": _EnumRecord}
        # Classes of this object's own, so that a pickle that assigns to one of them changes nothing else.
        self._known: dict[tuple[str, str], Any] = {
            key: special.get(name) or type(name, (_Record,), {}) for key, name in list_dcp_classes().items()
        }
        self._known |= {("torch", name): name for name in _DTYPES.split()}
        self._known |= {(module, name): _Record for module in ("pathlib", "pathlib._local") for name in _PATHS}
        self._known |= {
            ("torch", "Size"): tuple,
            ("torch.serialization", "_get_layout"): _Record,
            ("collections", "OrderedDict"): dict,
            ("builtins", "getattr"): _get_member,
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in for a class that torch writes. Raises CheckpointError for any other."""
        if (module, name) not in self._known:
            full_name = f"{module}.{name}"
            raise CheckpointError(
                f"{self._path}: names {full_name!r}, which is no class of a torch.distributed.checkpoint; refused, "
                "because pickles can run code; nothing of it was executed"
            )
        return self._known[module, name]


def _parse(metadata: Any) -> DcpMetadata:
    """Convert the records of a pickle. Raises ValueError, TypeError, LookupError or AttributeError if malformed."""
    if type(metadata).__name__ != "Metadata":
        raise ValueError(f"it holds {type(metadata).__name__} instead of Metadata")
    storage = {index.key: info.state for index, info in metadata.state["storage_data"].items()}
    tensors, objects = {}, []
    for name, entry in metadata.state["state_dict_metadata"].items():
        if type(entry).__name__ != "TensorStorageMetadata":
            objects.append(str(name))
            continue
        shape = tuple(map(int, entry.state["size"]))
        held = [chunk.state for chunk in entry.state["chunks"] if 0 not in chunk.state["sizes"]]
        chunks = tuple(_parse_chunk(name, shape, chunk, storage) for chunk in held)
        tensors[name] = DcpTensor(str(name), shape, str(entry.state["properties"].state[0]), chunks)
    return DcpMetadata(tensors, tuple(objects))


def _parse_chunk(name: str, shape: tuple[int, ...], chunk: Mapping[str, Any], storage: Mapping[Any, Any]) -> DcpChunk:
    box = Box(tuple(map(int, chunk["offsets"])), tuple(map(int, chunk["sizes"])))
    if not box.is_inside(shape):
        raise ValueError(f"{name}: chunk {box} is outside shape {list(shape)}")
    info = storage.get((name, box.offsets))
    if info is None:
        raise ValueError(f"{name}: no file is named for chunk {box}")
    if info.get("transform_descriptors"):
        raise ValueError(f"{name}: is stored transformed by {', '.join(info['transform_descriptors'])}")
    file, offset, length = info["relative_path"], int(info["offset"]), int(info["length"])
    if Path(file).name != file or min(offset, length) < 0:
        raise ValueError(f"{name}: chunk {box} is not in a file of the directory: {file!r}")
    return DcpChunk(box, file, offset, length)
