"""Power, clock and temperature of a GPU during a benchmark, by NVML (package nvidia-ml-py, module pynvml)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import mean

import torch

from raytrain_hpc.background_thread import run_in_background

_INTERVAL_S = 0.5
NOT_A_GPU, UNKNOWN = "needs a GPU", "unknown"


@dataclass
class Telemetry:
    """Means of the samples so far; None: there is no GPU, or NVML cannot be used."""

    power_w: float | None = None
    sm_clock_mhz: float | None = None
    temperature_c: float | None = None

    def to_json(self) -> dict[str, float | None]:
        """Return the means as JSON values."""
        return {"power_w": self.power_w, "sm_clock_mhz": self.sm_clock_mhz, "temperature_c": self.temperature_c}


@contextmanager
def sample_telemetry(device: torch.device) -> Iterator[Telemetry]:
    """Sample the state of a GPU twice per second while the context is active; fill in the means at its end."""
    telemetry, samples = Telemetry(), list[tuple[float, float, float]]()

    def sample(done: threading.Event) -> None:
        while (values := read_gpu_state(device)) is not None:
            samples.append(values)
            if done.wait(_INTERVAL_S):
                return

    with run_in_background("telemetry", sample):
        yield telemetry
    if samples:
        telemetry.power_w, telemetry.sm_clock_mhz, telemetry.temperature_c = map(mean, zip(*samples, strict=True))


def read_gpu_state(device: torch.device) -> tuple[float, float, float] | None:
    """Return power in W, clock of the multiprocessors in MHz and temperature in degrees Celsius of a GPU.

    None: `device` is none, nvidia-ml-py is not installed, or the driver does not tell, as of a MIG slice.
    """
    if device.type != "cuda" or find_spec("pynvml") is None:
        return None
    from pynvml import NVMLError

    try:
        power_mw, clock_mhz = torch.cuda.power_draw(device), torch.cuda.clock_rate(device)
        return power_mw / 1000, float(clock_mhz), float(torch.cuda.temperature(device))
    except (NVMLError, RuntimeError):
        return None
