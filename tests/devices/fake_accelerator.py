"""Device "fake": an accelerator for torch whose memory is host memory, to run the code for accelerators on CPUs.

Registered for the whole process, as torch has one place for such devices. Its module counts the calls of its functions.
"""

from __future__ import annotations

import subprocess
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

from raytrain_hpc.device_backends import BACKENDS, DeviceBackend

NAME, MEMORY_BYTES = "fake", 3 << 30
CALLS: Counter[str] = Counter()


def build_library(directory: Path) -> Path:
    """Compile the C++ part, which takes ten seconds, and return the library."""
    library, torch_libraries = directory / "fake_accelerator.so", Path(torch.__file__).parent / "lib"
    command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", "-DAT_PER_OPERATOR_HEADERS"]
    command += [f"-I{path}" for path in include_paths()]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    command += [str(Path(__file__).with_suffix(".cpp")), "-o", str(library)]
    command += [f"-L{torch_libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_libraries}"]
    subprocess.run(command, check=True, timeout=250, capture_output=True)
    return library


class Stream(torch.Stream):
    """A stream that runs its work at once."""

    def __new__(cls, device: torch.device | None = None) -> Stream:
        CALLS["Stream"] += 1
        return super().__new__(cls, device=NAME)

    def wait_stream(self, stream: Stream) -> None:
        CALLS["wait_stream"] += 1

    def wait_event(self, event: Event) -> None:
        CALLS["wait_event"] += 1

    def record_event(self) -> Event:
        CALLS["record_event"] += 1
        return Event()

    def synchronize(self) -> None:
        CALLS["Stream.synchronize"] += 1


class Event:
    """An event that has taken place when it is recorded."""

    def __init__(self, enable_timing: bool = False):
        self.is_recorded = False

    def record(self, stream: Stream | None = None) -> None:
        CALLS["Event.record"] += 1
        self.is_recorded = True

    def synchronize(self) -> None:
        CALLS["Event.synchronize"] += 1

    def elapsed_time(self, end: Event) -> float:
        assert self.is_recorded and end.is_recorded
        return 1.0


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    CALLS["stream"] += 1
    yield


def _count(name: str, result: Any = None) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        CALLS[name] += 1
        return result

    return call


def make_module() -> types.ModuleType:
    """Return the module `torch.fake`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.Stream, module.Event, module.stream = Stream, Event, use_stream
    module.current_stream = lambda device=None: Stream()
    module.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=MEMORY_BYTES)
    results = {"is_available": True, "device_count": 1, "current_device": 0, "get_device_name": "Fake Accelerator 1"}
    results |= {"is_bf16_supported": True, "max_memory_allocated": 2 << 30, "get_amp_supported_dtype": [torch.bfloat16]}
    results |= {"get_rng_state": torch.zeros(1), "_is_in_bad_fork": False}
    names = "synchronize set_device reset_peak_memory_stats empty_cache manual_seed manual_seed_all set_rng_state"
    for name in (*results, *names.split()):
        setattr(module, name, _count(name, results.get(name)))
    return module


def register(library: Path) -> torch.device:
    """Register the device in this process, for torch and for the platform."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(library)
    torch._register_device_module(NAME, make_module())
    BACKENDS[NAME] = DeviceBackend(NAME, NAME, "gloo", "GPU", "h100")  # type: ignore[arg-type]
    return torch.device(NAME, 0)
