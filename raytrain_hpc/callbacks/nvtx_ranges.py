"""NVTX ranges of training steps, for Nsight Systems."""

from __future__ import annotations

from typing import Any

from raytrain_hpc.callbacks.callback import Callback
from raytrain_hpc.torch_device import get_nvtx


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
        if (nvtx := get_nvtx(self.context.device)) is not None:
            nvtx.range_push(name)
            self._depth += 1

    def _pop(self) -> None:
        if self._depth:
            get_nvtx(self.context.device).range_pop()
            self._depth -= 1
