"""Cost of matrix products and attention: seconds from FLOPs, and the bytes that float8 moves besides."""

from __future__ import annotations

from collections.abc import Iterator

from raytrain_hpc.config.training_config import computes_in_bf16
from raytrain_hpc.planner.calibration import Calibration
from raytrain_hpc.planner.hardware import Device
from raytrain_hpc.planner.workload import Workload

BACKWARD_ATTENTION = 2.5  # time of the backward pass of fused attention, relative to the forward pass

# Efficiencies relative to large products, and the compiler's speedup: fitted to measurements on an H100 and an H200
# (benchmarks/RESULTS.md), within what keeps the predictions of published layouts.
# Fused attention in fp32, and in bf16 with wide heads; narrow ones lose as narrow products do.
_EXACT_ATTENTION_EFFICIENCY, _ATTENTION_EFFICIENCY = 0.7, 0.92
_GROUPED_EFFICIENCY = 0.8  # of products of experts in one kernel
_COMPILE_SPEEDUP = 1.29  # of products in compiled blocks
# Width at which a product is half as efficient as large ones, because its tiles do not fill the device.
_HALF_EFFICIENCY_WIDTH = 50.0
_MAX_EFFICIENCY = 0.9  # upper limit of the fraction of the peak, for any calibration
# Bytes moved to quantize, per element: of an input (cast 3, transposed copy 2; the largest magnitude is found as it is
# written), of an output's gradient (also read once, 2), of a weight (largest magnitude 4, cast 5, each in both passes,
# transposed copy 2).
_FLOAT8_INPUT_BYTES, _FLOAT8_GRADIENT_BYTES, _FLOAT8_WEIGHT_BYTES = 5, 7, 20
_FLOAT8_BANDWIDTH = 0.55  # share of the memory bandwidth that these kernels reach, measured on an H200


class ProductCost:
    """Estimator of the seconds of matrix products and attention of a workload on a device."""

    def __init__(self, workload: Workload, device: Device, calibration: Calibration):
        self._workload, self._device = workload, device
        peak_flops = (device.tflops if computes_in_bf16(workload.dtype) else device.exact_tflops) * 1e12
        speedup = _COMPILE_SPEEDUP if workload.compiled else 1.0
        self._achieved_flops = peak_flops * min(_MAX_EFFICIENCY, calibration.efficiency * speedup)

    def estimate(self, rows: float, inputs: float, outputs: float, *, is_float8: bool) -> float:
        """Estimate one of the three products of a linear layer, with a third of the quantization of all three."""
        narrowest, device = min(rows, inputs, outputs), self._device
        efficiency = narrowest / (narrowest + _HALF_EFFICIENCY_WIDTH)
        seconds = 2 * rows * inputs * outputs / (self._achieved_flops * efficiency)
        if not is_float8 or not device.float8_speedup:
            return seconds
        quantized_bytes = rows * (inputs * _FLOAT8_INPUT_BYTES + outputs * _FLOAT8_GRADIENT_BYTES)
        quantized_bytes += inputs * outputs * _FLOAT8_WEIGHT_BYTES
        quantization_s = quantized_bytes / (device.memory_gbs * 1e9 * _FLOAT8_BANDWIDTH)
        return seconds / device.float8_speedup + quantization_s / 3

    def estimate_layer(self, tokens: float, tp: int) -> float:
        """Estimate the products of a layer on one of `tp` ranks, in the forward pass."""
        return sum(
            self.estimate(rows, inputs, outputs, is_float8=is_float8)
            for rows, inputs, outputs, is_float8 in self._iter_products(tokens, tp)
        )

    def estimate_attention(self, tokens: float, tp: int) -> float:
        """Estimate fused causal attention, which computes half of the scores, in the forward pass."""
        spec, efficiency = self._workload.spec, _EXACT_ATTENTION_EFFICIENCY
        if computes_in_bf16(self._workload.dtype):
            efficiency = _ATTENTION_EFFICIENCY * spec.head_dim / (spec.head_dim + _HALF_EFFICIENCY_WIDTH)
        flops = 2 * tokens * self._workload.seq_len * spec.attention_size / tp
        return flops / (self._achieved_flops * efficiency)

    def _iter_products(self, tokens: float, tp: int) -> Iterator[tuple[float, float, float, bool]]:
        """Yield (rows, inputs, outputs, is_float8) of a layer's products on a rank, equal ones merged along rows."""
        spec, is_float8 = self._workload.spec, self._workload.dtype == "float8"
        h, ups = spec.hidden_size, spec.num_ffn_matrices - 1
        yield tokens, h, (spec.attention_size + 2 * spec.kv_size) / tp, is_float8
        yield tokens, spec.attention_size / tp, h, is_float8
        widths = [(tokens, spec.shared_expert_size if spec.num_experts else spec.ffn_size, is_float8)]
        if spec.num_experts:
            # As many rows as products outside of the group would compute in the time.
            widths.append((tokens * spec.experts_per_token / _GROUPED_EFFICIENCY, spec.ffn_size, False))
        for rows, width, is_narrow in widths:
            if width:
                yield rows, h, ups * width / tp, is_narrow
                yield rows, width / tp, h, is_narrow
