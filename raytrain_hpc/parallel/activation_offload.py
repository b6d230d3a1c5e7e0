"""Activation offload: the activations of a block wait in host memory for its backward pass.

The hooks of autograd for saved tensors decide at each block what is kept, so a block works as it is: compiled,
recomputed, sharded or split over ranks. Of a recomputed block autograd keeps the inputs, and only these move.

| while the device runs | copied to the host | copied back |
| --- | --- | --- |
| forward pass of block n | activations of block n - 1 | |
| backward pass of block n | | activations of block n - 1 |

Hence the device holds what two blocks keep, and the newest block of a rank never moves. Copies run on streams of their
own, one per direction. The memory of a tensor is released when the stream of the passes has waited for its copy, so
that it is reused in the order of that stream. On a CPU the same copies are made at once and save nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raytrain_hpc.errors import ModelError
from raytrain_hpc.torch_device import get_device_module, is_accelerator
from raytrain_hpc.torch_private import get_version

# Smallest storage that moves: below, a copy costs more than the memory is worth. On CPUs, tests move small ones too.
_MIN_BYTES, _MIN_BYTES_ON_CPU = 1 << 18, 1 << 10


class ActivationOffload:
    """Offload of the activations of all blocks of a rank."""

    def __init__(self, device: torch.device):
        self._engine = _CopyEngine(device)
        self._min_bytes = _MIN_BYTES if is_accelerator(device) else _MIN_BYTES_ON_CPU
        self._newest: _BlockActivations | None = None

    def apply(self, blocks: Sequence[nn.Module]) -> None:
        """Apply the offload to the blocks of a stage, in place. Call when recomputation and compile are applied."""
        for index, block in enumerate(blocks):
            block.forward = self._wrap_forward(block, block.forward, is_first=index == 0)  # type: ignore[method-assign]

    def _wrap_forward(self, block: nn.Module, forward: Callable[..., Any], *, is_first: bool) -> Callable[..., Any]:
        def offloaded_forward(*inputs: Any, **keywords: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs, **keywords)
            before = self._newest
            # The inputs but the first are shared by the blocks, such as rotary tables: they stay.
            shared = {_get_address(tensor) for tensor in _iter_tensors((*inputs[1:], keywords))}
            activations = _BlockActivations(block, self._engine, self._min_bytes, shared, None if is_first else before)
            if before is not None:
                before.start_offload()
            with saved_tensors_hooks(activations.pack, activations.unpack):
                output = forward(*inputs, **keywords)
            if before is not None:
                before.finish_offload()
            self._newest = activations
            return output

        return offloaded_forward


class _SavedStorage:
    """A storage that autograd keeps: on the device, in host memory, or on both while it is copied.

    It lives as long as autograd keeps a tensor in it.
    """

    def __init__(self, tensor: Tensor):
        self.tensor: Tensor | None = tensor.detach()  # on the device
        self.version = get_version(tensor)
        self.host_bytes: Tensor | None = None

    def get_device_bytes(self) -> Tensor:
        """Return the storage on the device as uint8 [bytes]. Raises ModelError if it was changed since it was saved."""
        if self.tensor is None:
            raise RuntimeError("activations are used before they are back on the device")
        if get_version(self.tensor) != self.version:
            raise ModelError(
                f"a block changes a tensor of shape {tuple(self.tensor.shape)} in place that its backward pass needs; "
                "change a copy of it"
            )
        return _as_bytes(self.tensor)

    def set_device_bytes(self, device_bytes: Tensor) -> None:
        """Set the storage on the device, and drop that in host memory."""
        self.tensor, self.version, self.host_bytes = device_bytes, get_version(device_bytes), None


@dataclass(frozen=True)
class _SavedTensor:
    """A tensor that autograd keeps: a view of a saved storage."""

    storage: _SavedStorage
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int  # in elements

    def rebuild(self) -> Tensor:
        """Return the tensor with its elements, shape and strides. Its storage must be on the device."""
        storage = self.storage.get_device_bytes().untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload,no-any-return]


class _BlockActivations:
    """What autograd keeps of one forward pass of a block."""

    def __init__(
        self,
        block: nn.Module,
        engine: _CopyEngine,
        min_bytes: int,
        shared: set[int],
        previous: _BlockActivations | None,
    ):
        """`shared`: addresses of storages that stay on the device. `previous`: of the block before, in this pass."""
        self._block, self._engine, self._min_bytes, self._shared = block, engine, min_bytes, shared
        self._previous = previous
        # By address. A storage that autograd has released is missing.
        self._storages: WeakValueDictionary[int, _SavedStorage] = WeakValueDictionary()
        self._is_in_use = False
        self._copying: list[Tensor] = []  # must not be released before the copy is done
        self._copied: Any = None  # an Event of the device

    def pack(self, tensor: Tensor) -> Tensor | _SavedTensor:
        """Return what autograd is to keep instead of a tensor."""
        if not self._engine.can_move(tensor) or tensor.untyped_storage().nbytes() < self._min_bytes:
            return tensor
        address = _get_address(tensor)
        storage = self._storages.get(address)
        if storage is None:
            if address in self._shared or _is_weight(tensor) or address in self._list_weight_addresses():
                return tensor
            storage = self._storages[address] = _SavedStorage(tensor)
        return _SavedTensor(storage, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, saved: Tensor | _SavedTensor) -> Tensor:
        """Return the tensor that was saved. The first call of a backward pass prefetches those of the block before."""
        if not self._is_in_use:
            self._is_in_use = True
            self._fetch()
            self._wait_for_copies()
            if self._previous is not None:
                self._previous._fetch()
                self._previous = None
        return saved.rebuild() if isinstance(saved, _SavedTensor) else saved

    def start_offload(self) -> None:
        """Start to copy to host memory what autograd still keeps. Call after the forward pass of the block."""
        storages = list(self._storages.values())
        self._copying = [storage.get_device_bytes() for storage in storages]
        host, self._copied = self._engine.copy_to_host(self._copying)
        for storage, host_bytes in zip(storages, host, strict=True):
            storage.host_bytes = host_bytes

    def finish_offload(self) -> None:
        """Release the memory of the device, in the order of the stream of the passes."""
        self._wait_for_copies()
        for storage in self._storages.values():
            storage.tensor = None

    def _fetch(self) -> None:
        """Start to copy back what is in host memory, once."""
        storages = [storage for storage in self._storages.values() if storage.tensor is None]
        host = [storage.host_bytes for storage in storages if storage.host_bytes is not None]
        if host:
            self._copying, self._copied = self._engine.copy_to_device(host)
            for storage, device_bytes in zip(storages, self._copying, strict=True):
                storage.set_device_bytes(device_bytes)

    def _wait_for_copies(self) -> None:
        self._engine.wait(self._copied)
        self._copying, self._copied = [], None

    def _list_weight_addresses(self) -> set[int]:
        """Return the addresses of the weights as they are now: ZeRO-3 gathers some for a part of the pass only."""
        return {_get_address(p) for p in self._block.parameters() if type(p) is nn.Parameter}


class _CopyEngine:
    """Copies of bytes between a device and host memory, ordered with the stream of the passes by events."""

    def __init__(self, device: torch.device):
        self._device = device
        self._module = get_device_module(device)
        self._streams: tuple[Any, Any] | None = None  # to the host, to the device
        if is_accelerator(device):
            self._streams = self._module.Stream(device), self._module.Stream(device)

    def can_move(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a plain one on this device, so that its bytes, shape and strides are all of it."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        return is_plain and tensor.device.type == self._device.type and not tensor.is_conj() and not tensor.is_neg()

    def copy_to_host(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start to copy; return the copies and an event of their end. Sources must be kept until then.

        Page-locked memory that is released is used again: torch's allocator for it knows which copies use it.
        """
        copies = [allocate_host_bytes(source.numel(), pinned=self._streams is not None) for source in sources]
        return copies, self._copy(sources, copies, 0)

    def copy_to_device(self, sources: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """Start to copy; return the copies and an event of their end. Use or release them only after a wait for it."""
        copies = [torch.empty_like(source, device=self._device) for source in sources]
        return copies, self._copy(sources, copies, 1)

    def wait(self, event: Any) -> None:
        """Make the stream of the passes wait for an event. None: it has taken place."""
        if event is not None:
            self._module.current_stream(self._device).wait_event(event)

    def _copy(self, sources: Sequence[Tensor], copies: Sequence[Tensor], direction: int) -> Any:
        if self._streams is None:
            for source, copy in zip(sources, copies, strict=True):
                copy.copy_(source)
            return None
        stream = self._streams[direction]
        stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(stream):
            for source, copy in zip(sources, copies, strict=True):
                copy.copy_(source, non_blocking=True)
        return stream.record_event()


def allocate_host_bytes(count: int, *, pinned: bool) -> Tensor:
    """Return host memory, uint8 [count], with undefined content."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=pinned)


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor, as uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _get_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, a view or a converted copy of one, such as autocast makes and keeps."""
    node = tensor.grad_fn
    while node is not None and len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    variable = tensor if node is None else getattr(node, "variable", None)
    return isinstance(variable, nn.Parameter) and variable.numel() == tensor.numel()


def _iter_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors in nested containers and dataclasses."""
    if type(value) is Tensor:
        yield value
    elif isinstance(value, Mapping):
        yield from _iter_tensors(tuple(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _iter_tensors(item)
    elif is_dataclass(value):
        yield from _iter_tensors(vars(value))
