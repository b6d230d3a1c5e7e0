"""Peak FLOP/s of known devices, for model FLOPs utilization (MFU)."""

from __future__ import annotations

import re

from raytrain_hpc.config.training_config import computes_in_bf16
from raytrain_hpc.planner.hardware import DEVICES

# Device names as drivers report them, with the planner's preset. Only whole devices of the preset's form factor: PCIe
# and NVL boards of the H100 and H200 are slower than the SXM modules, and a MIG slice is a part of a device.
_PRESETS_BY_NAME: tuple[tuple[str, str], ...] = (
    (r"\bA100\b(?!.*\bMIG\b)", "a100"),
    (r"\bH100\b(?!.*\b(PCIe|NVL|MIG)\b)", "h100"),
    (r"\bH200\b(?!.*\b(PCIe|NVL|MIG)\b)", "h200"),
    (r"\bB200\b(?!.*\bMIG\b)", "b200"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bMI250X\b", "mi250x"),
    (r"\bMax 1550\b|\bPVC\b", "pvc-tile"),
)


def get_peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of a device in TFLOP/s, by the name that its driver reports and a `train.dtype`.

    That of float8 is that of bf16, so that the utilization of both can be compared. None if it is unknown: a CPU,
    another device, fp32 or fp64.
    """
    if not computes_in_bf16(dtype):
        return None
    for pattern, preset in _PRESETS_BY_NAME:
        if re.search(pattern, device_name, re.IGNORECASE):
            return DEVICES[preset].tflops
    return None
