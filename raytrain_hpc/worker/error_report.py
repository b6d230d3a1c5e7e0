"""Report of the exception that ended a generation on a rank: its place, a short traceback, and what it comes from."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from pathlib import Path
from sysconfig import get_path
from traceback import FrameSummary

import torch
import torch.distributed

from raytrain_hpc.device_backends import is_device_error
from raytrain_hpc.elastic.death_report import is_out_of_memory
from raytrain_hpc.elastic.fault_attribution import is_peer_failure
from raytrain_hpc.parallel.blocking_collectives import get_blocking_files

_PACKAGE = str(Path(__file__).parent.parent)
_LIBRARY_PARTS = {"site-packages", "dist-packages"}
_LIBRARY_FOLDERS = (get_path("stdlib"), str(Path(torch.__file__).parent), "<")  # "<": generated code
# Files from which the user's factory, model and loss are called.
_CALLING_FILES = {str(Path(_PACKAGE, "training", name)) for name in ("forward_backward.py", "train_module.py")}
_DISTRIBUTED_FOLDERS = (str(Path(torch.distributed.__file__).parent), str(Path(_PACKAGE, "distributed")))
# Exceptions of storage, network and devices: they may not be raised again.
_ENVIRONMENT_ERRORS = (OSError, MemoryError, torch.AcceleratorError)


@dataclass(frozen=True)
class ErrorReport:
    """An exception as the driver reports it.

    `reason`: type, message and the place in the user's code, on one line. `traceback`: the frames of the user's code,
    or all frames if there are none; empty for a broken collective. `is_program_error`: the exception comes from the
    user's code, or from the passes of the model, and not from a peer, storage or a device.
    """

    reason: str
    traceback: str
    is_program_error: bool


def describe_error(error: BaseException) -> ErrorReport:
    """Return the report of an exception, which must have a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if is_user_file(frame.filename)]
    reason = (f"{type(error).__name__}: {error}".splitlines() or [""])[0]
    if own_frames:
        reason += f" ({Path(own_frames[-1].filename).name}:{own_frames[-1].lineno}, in {own_frames[-1].name})"
    if is_peer_failure(reason):
        return ErrorReport(reason, "", is_program_error=False)
    lines = traceback.format_list(own_frames or frames) + traceback.format_exception_only(error)
    text = "Traceback (most recent call last):\n" + "".join(lines).rstrip()
    return ErrorReport(reason, text, _is_program_error(error, frames, bool(own_frames)))


def is_user_file(path: str) -> bool:
    """Return whether a source file belongs neither to this package nor to an installed library."""
    is_library = path.startswith(_LIBRARY_FOLDERS) or not _LIBRARY_PARTS.isdisjoint(Path(path).parts)
    return not is_library and not path.startswith(_PACKAGE)


def _is_program_error(error: BaseException, frames: list[FrameSummary], has_own_frames: bool) -> bool:
    innermost = frames[-1].filename if frames else ""
    text = str(error)
    if isinstance(error, _ENVIRONMENT_ERRORS) or is_out_of_memory(text):
        return False
    if isinstance(error, RuntimeError) and is_device_error(text):
        return False
    if innermost in get_blocking_files() or innermost.startswith(_DISTRIBUTED_FOLDERS):
        return False
    return has_own_frames or any(frame.filename in _CALLING_FILES for frame in frames)
