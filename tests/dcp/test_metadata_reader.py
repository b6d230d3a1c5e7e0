"""`.metadata` of DCP directories: as versions of torch write it, damaged, and with code in it."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from enum import Enum
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from raytrain_hpc.dcp.metadata_reader import read_metadata
from raytrain_hpc.errors import CheckpointError
from tests.dcp.llama_reference import save_alone

STATE = {
    "weight": torch.arange(12.0).reshape(4, 3),
    "nested": {"half": torch.ones(5, dtype=torch.bfloat16), "step": torch.tensor(3), "name": "adam"},
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_alone(tmp_path / "dcp", STATE)


def test_tensors_and_objects_of_a_directory(directory: Path) -> None:
    metadata = read_metadata(directory)
    assert metadata.objects == ("nested.name",)
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in metadata.tensors.items()}
    assert found == {"weight": ((4, 3), "float32"), "nested.half": ((5,), "bfloat16"), "nested.step": ((), "int64")}
    theirs = FileSystemReader(directory).read_metadata()
    for index, info in theirs.storage_data.items():
        if index.fqn in metadata.tensors:
            (chunk,) = metadata.tensors[index.fqn].chunks
            assert (chunk.file, chunk.offset, chunk.length) == (info.relative_path, info.offset, info.length)
            assert chunk.box.offsets == tuple(index.offset)


class EnumByName(pickle.Pickler):
    """Writes enumerations as Python 3.11.2 does: by getattr."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def dump_enums_by_name(metadata: Metadata) -> bytes:
    file = BytesIO()
    EnumByName(file).dump(metadata)
    return file.getvalue()


def dump_as_torch_2_0(metadata: Metadata) -> bytes:
    """Return the pickle of versions that had the properties of tensors in another module, and fewer fields."""
    for field in ("storage_meta", "version"):
        delattr(metadata, field)
    content = pickle.dumps(metadata, protocol=2)
    current, former = b"torch.distributed.checkpoint.metadata\n", b"torch.distributed._shard.sharded_tensor.metadata\n"
    content = content.replace(current + b"TensorProperties", former + b"TensorProperties")
    return content.replace(current + b"_MEM_FORMAT_ENCODING", former + b"MEM_FORMAT_ENCODING")


@pytest.mark.parametrize(
    "dump",
    [
        *(lambda metadata, protocol=protocol: pickle.dumps(metadata, protocol) for protocol in range(2, 6)),
        dump_enums_by_name,
        dump_as_torch_2_0,
    ],
)
def test_pickles_of_other_versions_have_the_same_content(directory: Path, dump: Callable[[Metadata], bytes]) -> None:
    expected = read_metadata(directory)
    content = dump(FileSystemReader(directory).read_metadata())
    assert content != (directory / ".metadata").read_bytes()
    (directory / ".metadata").write_bytes(content)
    assert read_metadata(directory) == expected


class Call:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "state_dict_metadata"])
def test_code_in_a_pickle_is_refused_and_not_executed(directory: Path, tmp_path: Path, place: str) -> None:
    marker = tmp_path / "executed"
    metadata = FileSystemReader(directory).read_metadata()
    setattr(metadata, place, Call(os.system, f"touch {marker}"))
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"names 'posix\.system', .* refused.*nothing of it was executed"):
        read_metadata(directory)
    assert not marker.exists()
    FileSystemReader(directory).read_metadata()  # torch's reader does execute it
    assert marker.exists()


@pytest.mark.parametrize(
    "content, problem",
    [
        (pickle.dumps(Call(eval, "1 + 1")), r"names 'builtins\.eval'"),
        (pickle.dumps(Call(__import__, "os")), r"names 'builtins\.__import__'"),
        (pickle.dumps(Call(torch.load, "x")), r"names 'torch\.serialization\.load'"),
        (pickle.dumps(Call(getattr, Metadata, "__init__")), "something else than an enumeration"),
        (pickle.dumps(Call(getattr, torch.Size, "__class__")), "something else than an enumeration"),
        (b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93.", r"Metadata\.__init__"),
        (b"cos\nsystem\n(S'true'\ntR.", r"names 'os\.system'"),
        (b"\x80\x04\x8c\x03a\n\x1b\x8c\x01b\x93.", r"names 'a\\n\\x1b\.b'"),  # of control characters
        (b"\x80\x04\x8a\xff" + b"\x7f" * 255 + b"a\x93.", "is not the metadata"),
        (pickle.dumps({"weight": 1}), "holds dict instead of Metadata"),
        (b"", "Ran out of input"),
        (b"not a pickle", "is not the metadata"),
    ],
)
def test_other_pickles_are_refused(directory: Path, content: bytes, problem: str) -> None:
    (directory / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as error:
        read_metadata(directory)
    assert "\n" not in str(error.value)


def change_infos(**values: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        for info in metadata.storage_data.values():
            vars(info).update(values)

    return change


def shift_chunks(metadata: Metadata) -> None:
    (chunk,) = metadata.state_dict_metadata["weight"].chunks
    chunk.offsets = torch.Size([1, 0])


@pytest.mark.parametrize(
    "change, problem",
    [
        (change_infos(relative_path="../secret"), r"not in a file of the directory: '\.\./secret'"),
        (change_infos(relative_path="/etc/passwd"), "not in a file of the directory"),
        (change_infos(offset=-1), "not in a file of the directory"),
        (change_infos(transform_descriptors=["zstd"]), "is stored transformed by zstd"),
        (lambda metadata: metadata.storage_data.clear(), r"no file is named for chunk \[0:4,0:3\]"),
        (shift_chunks, r"weight: chunk \[1:5,0:3\] is outside shape \[4, 3\]"),
        (lambda metadata: setattr(metadata, "storage_data", None), "is not the metadata"),
    ],
)
def test_inconsistent_metadata_is_refused(directory: Path, change: Callable[[Metadata], None], problem: str) -> None:
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=problem):
        read_metadata(directory)


def test_the_directory_of_a_step_is_suggested(tmp_path: Path) -> None:
    save_alone(tmp_path / "outputs" / "step-100", STATE)
    with pytest.raises(CheckpointError, match=r"No such file.*; give the directory of one step, for .*step-100"):
        read_metadata(tmp_path / "outputs")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="`raytrain-hpc import-hf` imports them"):
        read_metadata(tmp_path)
    (tmp_path / "__0.metadata").touch()
    with pytest.raises(CheckpointError, match="its ranks have saved without coordination"):
        read_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="give a directory that torch.distributed.checkpoint.save has written"):
        read_metadata(tmp_path / "nowhere")
