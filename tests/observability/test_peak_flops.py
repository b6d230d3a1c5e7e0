"""Peak FLOP/s by device name."""

import pytest

from raytrain_hpc.observability.peak_flops import get_peak_tflops


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H200", 989.0),
        ("h100", 989.0),
        ("NVIDIA B200", 2250.0),
        ("AMD Instinct MI300X", 1307.0),
        ("AMD Instinct MI250X", 191.5),
        ("Intel(R) Data Center GPU Max 1550", 419.5),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("Tesla V100-SXM2-16GB", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks_match_the_data_sheets(name: str, peak: float | None):
    assert get_peak_tflops(name, "bf16") == peak


def test_peaks_of_other_types_are_unknown():
    assert get_peak_tflops("NVIDIA H100 80GB HBM3", "fp32") is None
