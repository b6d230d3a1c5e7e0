"""Metric keys with their definitions, used in metrics.jsonl and as TensorBoard tags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

METRIC_KEYS = {
    "step": "Number of committed optimizer steps, including this one: the first step writes 1.",
    "train/loss": "Sum of the token losses over the global batch divided by its valid tokens, in nats.",
    "train/lr": "Learning rate of this step.",
    "train/grad_norm": "Euclidean norm of the gradient of train/loss, before clipping.",
    "train/tokens": "Tokens trained on since the first step of the run (sequences x length).",
    "throughput/tokens_per_sec": "Tokens of the step divided by time/step_s.",
    "throughput/tokens_per_sec_per_device": "throughput/tokens_per_sec divided by the number of workers.",
    "throughput/mfu": "Model FLOPs of the step divided by (time/step_s x devices x peak); null if the peak is unknown.",
    "time/unix": "Unix time of the commit of the step.",
    "time/step_s": "Time from the end of the previous step to the end of this one on rank 0, without checkpoints and "
    "evaluations.",
    "time/data_s": "Part of time/step_s: waiting for data.",
    "time/forward_s": "Part of time/step_s: forward passes of rank 0, including their communication. On a GPU, this "
    "and the following parts are those of the step before, which are known without waiting for the device.",
    "time/backward_s": "Part of time/step_s: backward passes of rank 0, overlapped with gradient reductions.",
    "time/communication_s": "Part of time/step_s after the last backward pass: remaining reductions, sums over ranks, "
    "gradient norm.",
    "time/optimizer_s": "Part of time/step_s: the optimizer step.",
    "time/checkpoint_s": "Time of a checkpoint after the step: the copy; writing is asynchronous.",
    "memory/peak_gib": "Peak memory of rank 0's device; on CPU, peak resident memory of its process.",
    "memory/weights_gib": "Weights on rank 0 between steps, without bf16 copies.",
    "memory/gradients_gib": "Gradients passed to the optimizer on rank 0.",
    "memory/moments_gib": "Optimizer moments of rank 0, including offloaded ones.",
    "elastic/world_size": "Number of ranks in the step.",
    "elastic/generation": "Generation of the process groups; increases by one at each restart.",
    "elastic/audited": "1: audited by another rank, and right (fault.audit_interval); 0: audited by the same rank.",
    "val/loss": "Sum of the token losses over the validation windows divided by their tokens; at evaluations only.",
}

RANK_STATISTIC_KEYS = (
    *(f"time/{part}_s" for part in ("step", "data", "forward", "backward", "communication", "optimizer")),
    "memory/peak_gib",
)
"""Keys whose statistics over all ranks are written every logging.rank_stats_interval steps."""

STATISTICS = {"mean": "mean", "min": "minimum", "max": "maximum", "std": "standard deviation"}

METRIC_KEYS |= {
    f"ranks/{key}/{kind}": f"Every logging.rank_stats_interval steps: {description} of {key} over all ranks."
    for key in RANK_STATISTIC_KEYS
    for kind, description in STATISTICS.items()
}


def get_eval_key(name: str = "") -> str:
    """Return the key of the loss on a validation set; without a name, of that on all sets."""
    return f"val/{name}/loss" if name else "val/loss"


def compute_mfu(tokens_per_sec: float, flops_per_token: float, devices: int, peak_tflops: float | None) -> float | None:
    """Compute model FLOPs utilization: achieved over peak FLOP/s (PaLM, arXiv 2204.02311, appendix B).

    Returns None if the peak is unknown.
    """
    if peak_tflops is None:
        return None
    return tokens_per_sec * flops_per_token / (devices * peak_tflops * 1e12)


def compute_mean_rates(steps: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return mean step time, throughput and MFU of several steps, under their metric keys; {} without steps.

    Tokens and time are summed before they are divided, so that the rates are those of the whole stretch. The MFU is
    None if that of a step is.
    """
    if not steps:
        return {}
    step_s = [line["time/step_s"] for line in steps]
    device_s = [line["time/step_s"] * line["elastic/world_size"] for line in steps]
    tokens = sum(line["throughput/tokens_per_sec"] * line["time/step_s"] for line in steps)
    mfus = [line.get("throughput/mfu") for line in steps]
    weighted_mfus = [mfu * seconds for mfu, seconds in zip(mfus, device_s, strict=True) if mfu is not None]
    return {
        "time/step_s": sum(step_s) / len(steps),
        "throughput/tokens_per_sec": tokens / sum(step_s),
        "throughput/tokens_per_sec_per_device": tokens / sum(device_s),
        "throughput/mfu": sum(weighted_mfus) / sum(device_s) if len(weighted_mfus) == len(steps) else None,
    }
