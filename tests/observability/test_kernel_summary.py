"""Summary of a profile, compared with torch's own averages and with times that are known."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile, record_function

from raytrain_hpc.observability.kernel_summary import (
    ATTENTION,
    COMMUNICATION,
    GEMM,
    KINDS,
    OTHER,
    KernelSummary,
    ProfiledEvent,
    classify_operation,
    summarize_events,
)
from raytrain_hpc.observability.profiler import summarize_profile


def test_operations_are_those_of_torchs_own_averages() -> None:
    layer = nn.Linear(32, 32)
    with profile() as profiler, record_function("a name that is no operation"):
        for _ in range(3):
            q, k, v = (layer(torch.randn(2, 4, 16, 32)) for _ in range(3))
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    summary = summarize_profile(profiler)
    averages = {event.key: event for event in profiler.key_averages() if event.key != "a name that is no operation"}
    assert {operation.name for operation in summary.operations} == averages.keys()
    for operation in summary.operations:
        average = averages[operation.name]
        assert operation.calls == average.count
        assert operation.seconds == pytest.approx(average.self_cpu_time_total / 1e6, abs=1e-9)
    assert [operation.seconds for operation in summary.operations] == sorted(
        (average.self_cpu_time_total / 1e6 for average in averages.values()), reverse=True
    )
    products = sum(averages[name].self_cpu_time_total for name in ("aten::addmm", "aten::mm"))
    total = sum(average.self_cpu_time_total for average in averages.values())
    assert summary.compute_share(GEMM) == pytest.approx(products / total)
    assert summary.compute_share(ATTENTION) > 0 and summary.compute_share(COMMUNICATION) == 0
    assert sum(map(summary.compute_share, KINDS)) == pytest.approx(1.0)
    assert 0 <= summary.idle_s < summary.window_s
    assert KernelSummary.from_json(json.loads(json.dumps(summary.to_json()))) == summary


def test_idle_time_is_what_no_event_covers() -> None:
    """Events overlap, contain each other and leave gaps of 2 and 5 us in a window of 20 us."""
    spans = [(100, 104), (101, 103), (103, 106), (108, 110), (115, 120), (115, 118)]
    events = [ProfiledEvent("gemm", start, end, end - start) for start, end in spans]
    summary = summarize_events("cuda", events)
    assert (summary.window_s, summary.idle_s) == (pytest.approx(20e-6), pytest.approx(7e-6))
    assert summary.busy_s == pytest.approx(19e-6) and summary.idle_share == pytest.approx(0.35)
    assert [(row.name, row.calls) for row in summary.operations] == [("gemm", 6)]


def test_of_a_gpu_only_kernels_count() -> None:
    """Neither operators, which launch them, nor named regions on the GPU's timeline. With stand-ins for events."""

    def make_event(name: str, device: str, start: float, end: float, *, is_region: bool = False) -> SimpleNamespace:
        span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
        device_type = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, device_type=device_type, time_range=span, is_user_annotation=is_region)

    events = [
        make_event("aten::mm", "CPU", 0, 50),
        make_event("step", "CUDA", 10, 90, is_region=True),
        make_event("nvjet_tst_128x256", "CUDA", 10, 30),
        make_event("Memcpy DtoH (Device -> Pinned)", "CUDA", 80, 90),
    ]
    summary = summarize_profile(SimpleNamespace(events=lambda: events))
    assert summary.device == "cuda" and summary.list_names(GEMM) == ["nvjet_tst_128x256"]
    assert [(row.calls, round(row.seconds * 1e6)) for row in summary.operations] == [(1, 20), (1, 10)]
    assert summary.idle_share == pytest.approx(50 / 80) and summary.compute_share(GEMM) == pytest.approx(2 / 3)


def test_an_empty_profile_has_no_shares() -> None:
    summary = summarize_events("cuda", [])
    assert (summary.window_s, summary.idle_share, summary.compute_share(GEMM)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_sm90_tst_256x128_64x4_2x1_v_bz_coopA_NNT", GEMM),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3", GEMM),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_nn_align8>", GEMM),
        ("triton_tem_fused_addmm_relu_3", GEMM),
        ("aten::mm", GEMM),
        ("aten::_scaled_mm", GEMM),
        ("aten::_grouped_mm", GEMM),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_31x128x128", ATTENTION),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", ATTENTION),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)", ATTENTION),
        ("triton_tem_fused_flex_attention_2", ATTENTION),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", ATTENTION),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("gloo:all_reduce", COMMUNICATION),
        ("triton_poi_fused__scaled_dot_product_flash_attention_mm_4", OTHER),
        ("triton_red_fused_addmm_native_layer_norm_1", OTHER),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", OTHER),
        ("AddmmBackward0", OTHER),
        ("autograd::engine::evaluate_function: ScaledDotProductFlashAttentionForCpuBackward0", OTHER),
        ("aten::mul", OTHER),
        ("aten::mean", OTHER),
    ],
)
def test_operations_are_classified_by_name(name: str, kind: str) -> None:
    assert classify_operation(name) == kind
