"""Silent corruption for drills and tests: one flipped bit in what a training step reads, computes or writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_hpc.parallel.computation_trace import ComputationTracer
from raytrain_hpc.state.sharded_state import ShardedState

UpdateHook = Callable[[Mapping[str, Tensor]], None]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def flip_bit(tensor: Tensor, bit: int) -> None:
    """Flip bit `bit` of the first element, in place and unseen by autograd. Modulo the width; bit 0 is the lowest."""
    data = tensor.detach().data
    width = 8 * data.element_size()
    bit %= width
    mask = 1 << bit if bit < width - 1 else -(1 << bit)
    data.view(_INTEGERS[data.element_size()])[(0,) * data.ndim].bitwise_xor_(mask)


class ModelBitFlip:
    """A bit flip in what the modules of a rank read, return, or receive as gradient, while they train.

    `kind`: bitflip_batch, the first tensor among the inputs; bitflip_activation, of the outputs; bitflip_gradient, the
    gradient of that output. With a pipeline, inputs and outputs are those of the first stage of the rank that runs.
    """

    def __init__(self, kind: str, bit: int, tracer: ComputationTracer, *, is_persistent: bool):
        """`tracer`: tells passes of audits, which only a persistent flip hits."""
        self._kind, self._bit, self._is_persistent, self._tracer = kind, bit, is_persistent, tracer
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, modules: Iterable[nn.Module]) -> None:
        """Corrupt the next forward or backward pass of the modules; each one if the flip is persistent."""
        for module in modules:
            if self._kind == "bitflip_batch":
                self._handles.append(module.register_forward_pre_hook(self._flip_inputs, with_kwargs=True))
            else:
                self._handles.append(module.register_forward_hook(self._flip_output))

    def _flip_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._hits(module) and (tensor := _find_tensor((args, kwargs), lambda tensor: True)) is not None:
            flip_bit(tensor, self._bit)
            self._end()

    def _flip_output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = _find_tensor(output, torch.is_floating_point) if self._hits(module) else None
        if tensor is None or (self._kind == "bitflip_gradient" and not tensor.requires_grad):
            return
        if self._kind == "bitflip_gradient":
            tensor.register_hook(self._flip_gradient)  # type: ignore[no-untyped-call]
        else:
            flip_bit(tensor, self._bit)
        self._end()

    def _flip_gradient(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        flip_bit(gradient, self._bit)
        return gradient

    def _hits(self, module: nn.Module) -> bool:
        return module.training and (self._is_persistent or not self._tracer.drops_contributions)

    def _end(self) -> None:
        if not self._is_persistent:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()


class CallBitFlip:
    """A bit flip in what calls of a function in this process compute or receive: the next one, or all of them."""

    def __init__(self, owner: Any, name: str, bit: int, *, is_persistent: bool):
        """`owner`, `name`: of a function that returns a tensor, or fills its first argument."""
        self._owner, self._name, self._bit, self._is_persistent = owner, name, bit, is_persistent
        self._original = getattr(owner, name)

    def attach(self) -> None:
        """Begin to corrupt calls."""
        original, bit_flip = self._original, self

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if hasattr(result, "wait"):
                result.wait()
            output = result if isinstance(result, Tensor) else args[0]
            if output.is_floating_point() and output.numel():
                flip_bit(output, bit_flip._bit)
                if not bit_flip._is_persistent:
                    bit_flip.detach()
            return result

        setattr(self._owner, self._name, call)

    def detach(self) -> None:
        """Corrupt no more calls."""
        setattr(self._owner, self._name, self._original)


class UpdateBitFlip:
    """A bit flip in the first weight that an optimizer computes: in its next update, or in all of them."""

    def __init__(self, hooks: list[UpdateHook], bit: int, *, is_persistent: bool):
        """`hooks`: those of the optimizer, called with the weights that it has updated."""
        self._hooks, self._bit, self._is_persistent = hooks, bit, is_persistent

    def attach(self) -> None:
        """Begin to corrupt updates."""
        self._hooks.append(self._flip)

    def detach(self) -> None:
        """Corrupt no more updates."""
        if self._flip in self._hooks:
            self._hooks.remove(self._flip)

    def _flip(self, weights: Mapping[str, Tensor]) -> None:
        weight = next((weight for weight in weights.values() if weight.numel()), None)
        if weight is not None:
            flip_bit(weight, self._bit)
            if not self._is_persistent:
                self.detach()


def flip_state_bit(state: ShardedState, prefix: str, bit: int) -> None:
    """Flip a bit of the first element of this rank's first tensor whose name begins with `prefix`, if it has one."""
    for shard in state:
        if shard.name.startswith(prefix) and shard.tensor.numel() and shard.tensor.is_floating_point():
            flip_bit(shard.tensor, bit)
            return


def flip_gradient_bit(gradients: Mapping[str, Tensor], bit: int) -> None:
    """Flip a bit of the first element of this rank's gradients after their reduction."""
    gradient = next((gradient for gradient in gradients.values() if gradient.numel()), None)
    if gradient is not None:
        flip_bit(gradient, bit)


def _find_tensor(value: Any, is_wanted: Callable[[Tensor], bool]) -> Tensor | None:
    """Return the first tensor with elements in nested containers that is wanted; None if there is none."""
    if isinstance(value, Tensor):
        return value if value.numel() and is_wanted(value) else None
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return next((found for part in parts if (found := _find_tensor(part, is_wanted)) is not None), None)
