"""Published peak FLOP/s of known devices, for model FLOPs utilization."""

from __future__ import annotations

import re

# Dense bf16 TFLOP/s of a full device, from the vendors' data sheets, without sparsity. PCIe and NVL boards of the H100
# and H200 are slower than the SXM modules, and a MIG slice is a fraction of a device: their peak is unknown.
_BF16_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bA100\b(?!.*\bMIG\b)", 312.0),
    (r"\bH[12]00\b(?!.*\b(PCIe|NVL|MIG)\b)", 989.0),
    (r"\bB200\b(?!.*\bMIG\b)", 2250.0),
    (r"\bMI300X\b", 1307.0),
    (r"\bMax 1550\b|\bPVC\b", 420.0),
)


def get_peak_tflops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak in TFLOP/s of a device, by the name that its driver reports, for a `train.dtype`.

    Returns None if it is unknown: for CPUs, other devices, and types other than bf16.
    """
    if dtype != "bf16":
        return None
    for pattern, peak in _BF16_PEAKS:
        if re.search(pattern, device_name, re.IGNORECASE):
            return peak
    return None
