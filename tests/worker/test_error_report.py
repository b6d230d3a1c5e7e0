"""Report of an exception that ended a rank: its place in the user's code, and whether it comes from there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from raytrain_hpc.worker.error_report import ErrorReport, describe_error, is_user_file


def report(function: Callable[[], Any]) -> ErrorReport:
    """Return the report of the exception that a function raises."""
    try:
        function()
    except Exception as error:
        return describe_error(error)
    raise AssertionError("nothing was raised")


def multiply() -> torch.Tensor:
    return nn.Linear(2, 2)(torch.ones(3))


def raise_error(error: Exception) -> None:
    raise error


def test_traceback_has_only_the_frames_of_the_user() -> None:
    found = report(multiply)
    frames = [line.strip() for line in found.traceback.splitlines() if line.startswith("  File")]
    line = multiply.__code__.co_firstlineno + 1
    assert frames[-1] == f'File "{__file__}", line {line}, in multiply'
    assert all(__file__ in frame for frame in frames)
    assert found.reason.startswith("RuntimeError: ") and found.reason.endswith(
        f"({Path(__file__).name}:{line}, in multiply)"
    )
    assert found.is_program_error


@pytest.mark.parametrize(
    ("function", "is_program_error", "has_traceback"),
    [
        (lambda: raise_error(KeyError("tokens")), True, True),
        (lambda: raise_error(ConnectionError("storage")), False, True),
        (lambda: raise_error(MemoryError("3 GiB")), False, True),
        (lambda: raise_error(RuntimeError("CUDA error: out of memory")), False, True),
        (
            lambda: raise_error(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm")),
            False,
            True,
        ),
        (lambda: raise_error(RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED")), False, True),
        (lambda: raise_error(RuntimeError("[gloo] Connection closed by peer")), False, False),
        (lambda: dist.all_reduce(torch.ones(1)), False, True),  # raised by torch.distributed: no group
    ],
)
def test_what_an_exception_comes_from(function: Callable[[], Any], is_program_error: bool, has_traceback: bool) -> None:
    found = report(function)
    assert (found.is_program_error, bool(found.traceback)) == (is_program_error, has_traceback)


def test_files_of_the_user() -> None:
    assert is_user_file(__file__) and is_user_file("/home/me/train.py") and is_user_file("/tmp/ipykernel_3/1.py")
    for library_file in (torch.__file__, pytest.__file__, describe_error.__code__.co_filename, "<frozen runpy>"):
        assert not is_user_file(library_file)
