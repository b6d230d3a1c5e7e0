"""NVTX ranges of training steps, for Nsight Systems."""

from __future__ import annotations

from typing import Any

import torch

from raytrain_hpc.callbacks.callback import Callback


class NvtxRanges(Callback):
    """NVTX ranges "step N", and inside it "forward_backward", "reduce" and "optimizer". Without a GPU it does nothing.

    The ranges end where the hooks of this callback are called; kernels of a range can end later.
    """

    priority = 150  # outside of what other callbacks do in a step

    def __init__(self) -> None:
        self._depth = 0

    def pre_step(self) -> None:
        """Begin the ranges of the step and of its passes. A step that is recomputed begins again."""
        self.close()
        self._push(f"step {self.context.step + 1}")
        self._push("forward_backward")

    def post_forward_backward(self) -> None:
        """Begin the range of the reductions."""
        self._pop()
        self._push("reduce")

    def pre_optim_step(self) -> None:
        """Begin the range of the optimizer."""
        self._pop()
        self._push("optimizer")

    def post_step(self, metrics: dict[str, Any]) -> None:
        """End all ranges of the step."""
        self.close()

    def close(self) -> None:
        """End the ranges that are open."""
        while self._depth:
            self._pop()

    def _push(self, name: str) -> None:
        if self.context.device.type == "cuda":
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
            self._depth += 1

    def _pop(self) -> None:
        if self._depth:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
            self._depth -= 1
