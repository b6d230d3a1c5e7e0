"""Optimizer offload: moments on the device, in host memory, or on disk.

After ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) and the NVMe optimizer of ZeRO-Infinity (Rajbhandari et al. 2021,
arXiv 2104.07857). Offloaded moments stay off the device, and the CPU updates them. The weights on the device are fp32
and are the only copy, since a restore could leave a second one stale. A chunk of weights is copied to the host with its
gradients, through page-locked memory, and the new weights are copied back. CPU and GPU kernels agree to rounding; on a
CPU every storage gives the same bits.

Restoring and saving access all moments; `MomentStorage.release_memory` frees the memory that this takes. Until then the
kernel can reclaim it, as it is backed by a file. A save copies a rank's shards into a host buffer that it reuses, since
the next step changes moments while they are written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ModelError, OffloadError
from raytrain_hpc.optim.mmap_buffer import PAGE, MmapBuffer, get_free_bytes, round_up_to_page
from raytrain_hpc.torch_device import get_device_module, is_on_accelerator

CHUNK_BYTES = 32 * 2**20  # of moments per chunk

Slices = Mapping[str, Tensor]


@dataclass(frozen=True)
class OptimizerChunk:
    """Arguments of one call of the optimizer's kernel: lists of equal length, moments by kind.

    `names`: of the parameters that they belong to. One parameter can be in several chunks.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    moments: Mapping[str, Sequence[Tensor]]
    names: Sequence[str] = ()


class MomentStorage(Protocol):
    """Storage of moments. `slices`: the weights on the device; moments have their names and shapes."""

    slices: Slices
    moments: dict[str, dict[str, Tensor]]

    def iter_chunks(self, gradients: Slices, targets: Slices | None = None) -> Iterator[OptimizerChunk]:
        """Yield the tensors to update with these gradients, in chunks. Update each before requesting the next.

        When the iterator is exhausted, the weights on the device are updated. `targets`: tensors to be updated instead
        of the weights, which are then the `weights` of a chunk.
        """

    def release_memory(self) -> None:
        """Release the memory that reading or filling moments took."""

    def make_temporary(self, slices: Slices) -> MomentStorage:
        """Return a storage of moments of other weights, zero and in memory, which gives updates of the same bits.

        `slices`: on the device of the moments.
        """


class OnDevice:
    """Moments on the device of the weights: one chunk, and no copies."""

    def __init__(self, slices: Slices, kinds: Iterable[str], dtype: torch.dtype | None = None):
        """`dtype`: of the moments, as in all storages; None: that of the weights."""
        self.slices, self._dtype = slices, dtype
        self.moments = {kind: {name: torch.zeros_like(s, dtype=dtype) for name, s in slices.items()} for kind in kinds}

    def iter_chunks(self, gradients: Slices, targets: Slices | None = None) -> Iterator[OptimizerChunk]:
        """Yield all tensors as one chunk."""
        if gradients:
            weights = [(targets or self.slices)[name] for name in gradients]
            ordered = [_match_layout(self.slices[name], gradient) for name, gradient in gradients.items()]
            yield OptimizerChunk(
                weights,
                ordered,
                {kind: [moments[name] for name in gradients] for kind, moments in self.moments.items()},
                list(gradients),
            )

    def release_memory(self) -> None:
        """Do nothing: moments stay on the device."""

    def make_temporary(self, slices: Slices) -> MomentStorage:
        """Implement `MomentStorage.make_temporary`."""
        return OnDevice(slices, tuple(self.moments), self._dtype)


class CpuOffload:
    """Moments in host memory. Weights and gradients are copied there by chunks, and new weights copied back."""

    def __init__(
        self,
        slices: Slices,
        kinds: Sequence[str],
        chunk_bytes: int = CHUNK_BYTES,
        dtype: torch.dtype | None = None,
    ):
        self.slices, self._kinds, self._chunk_bytes, self._dtype = slices, kinds, chunk_bytes, dtype
        check_dense(slices)
        self.moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        for name, tensor in slices.items():
            for kind in kinds:
                flat = self._allocate_zeros(tensor.numel(), dtype or tensor.dtype)
                self.moments[kind][name] = flat.as_strided(tensor.shape, tensor.stride())

    def iter_chunks(self, gradients: Slices, targets: Slices | None = None) -> Iterator[OptimizerChunk]:
        """Yield chunks of at most `chunk_bytes` of moments."""
        flat_gradients = {
            name: flatten(_match_layout(self.slices[name], gradient)) for name, gradient in gradients.items()
        }
        targets = targets or self.slices
        chunks = [self._make_chunk(runs, flat_gradients, targets) for runs in self._plan_chunks(gradients)]
        for index, chunk in enumerate(chunks):
            self._prefetch(chunks[index + 1 : index + 2])
            host_chunk = self._to_host(chunk)
            yield host_chunk
            for weight, host_weight in zip(chunk.weights, host_chunk.weights, strict=True):
                if weight is not host_weight:
                    weight.copy_(host_weight, non_blocking=True)
            self._post_step(chunk)

    def release_memory(self) -> None:
        """Do nothing: moments stay in host memory."""

    def make_temporary(self, slices: Slices) -> MomentStorage:
        """Implement `MomentStorage.make_temporary`."""
        return OnDevice(slices, self._kinds, self._dtype)

    def _allocate_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def _prefetch(self, chunks: Sequence[OptimizerChunk]) -> None:
        """Prefetch the next chunk, if there is one. Called before the current chunk is updated."""

    def _post_step(self, chunk: OptimizerChunk) -> None:
        """Finish a chunk. Called after it has been updated."""

    def _to_host(self, chunk: OptimizerChunk) -> OptimizerChunk:
        """Return a chunk with weights and gradients in host memory."""
        devices = {weight.device for weight in chunk.weights if is_on_accelerator(weight)}
        if not devices:
            return chunk
        host_chunk = replace(
            chunk,
            weights=[_copy_to_pinned(weight) for weight in chunk.weights],
            gradients=[_copy_to_pinned(gradient) for gradient in chunk.gradients],
        )
        for device in devices:
            get_device_module(device).current_stream(device).synchronize()
        return host_chunk

    def _make_chunk(self, runs: Sequence[tuple[str, slice]], gradients: Slices, targets: Slices) -> OptimizerChunk:
        weights = [flatten(targets[name])[run] for name, run in runs]
        moments = {kind: [flatten(tensors[name])[run] for name, run in runs] for kind, tensors in self.moments.items()}
        return OptimizerChunk(
            weights, [gradients[name][run] for name, run in runs], moments, [name for name, _ in runs]
        )

    def _plan_chunks(self, names: Iterable[str]) -> Iterator[list[tuple[str, slice]]]:
        """Yield the runs of elements of each chunk: a part of a large tensor, or several small tensors.

        Large tensors are split at multiples of PAGE elements. These fall on whole pages of a file and keep the vectors
        of the kernel whole, so that chunks do not change the bits.
        """
        runs, remaining_bytes = list[tuple[str, slice]](), self._chunk_bytes
        for name in names:
            tensor = self.slices[name]
            itemsize = (self._dtype or tensor.dtype).itemsize
            max_elements = max(PAGE, self._chunk_bytes // (itemsize * len(self._kinds)) // PAGE * PAGE)
            for start in range(0, tensor.numel(), max_elements):
                stop = min(start + max_elements, tensor.numel())
                needed_bytes = round_up_to_page((stop - start) * itemsize) * len(self._kinds)
                if runs and needed_bytes > remaining_bytes:
                    yield runs
                    runs, remaining_bytes = [], self._chunk_bytes
                runs.append((name, slice(start, stop)))
                remaining_bytes -= needed_bytes
        if runs:
            yield runs


class DiskOffload(CpuOffload):
    """Moments in a mapped file. A step has one chunk in memory while the next one is prefetched.

    Raises OSError if the directory has no space for them.
    """

    def __init__(
        self,
        slices: Slices,
        kinds: Sequence[str],
        directory: str,
        chunk_bytes: int = CHUNK_BYTES,
        dtype: torch.dtype | None = None,
    ):
        self._buffer = MmapBuffer(directory, compute_file_bytes(slices, kinds, dtype))
        super().__init__(slices, kinds, chunk_bytes, dtype)

    def release_memory(self) -> None:
        """Release all pages to the file."""
        self._buffer.release_all()

    def _allocate_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._buffer.zeros(count, dtype)

    def _prefetch(self, chunks: Sequence[OptimizerChunk]) -> None:
        self._buffer.prefetch([tensor for chunk in chunks for tensor in _list_moments(chunk)])

    def _post_step(self, chunk: OptimizerChunk) -> None:
        self._buffer.release(_list_moments(chunk))


def make_moment_storage(
    config: Config, rank: int, slices: Slices, kinds: Sequence[str], dtype: torch.dtype | None = None
) -> MomentStorage:
    """Create the storage that `parallel.offload` asks for. Raises OffloadError if the disk has no space."""
    mode, directory = config.parallel.offload, config.parallel.offload_dir
    on_host = all(tensor.device.type == "cpu" for tensor in slices.values())
    if mode == "none" or (mode == "cpu" and on_host):
        return OnDevice(slices, kinds, dtype)
    if mode == "cpu":
        return CpuOffload(slices, kinds, dtype=dtype)
    try:
        return DiskOffload(slices, kinds, directory, dtype=dtype)
    except OSError as error:
        free_bytes = get_free_bytes(directory)
        free_text = "" if free_bytes is None else f" ({free_bytes / 2**30:.2f} GiB free)"
        needed_gib = compute_file_bytes(slices, kinds, dtype) / 2**30
        remedy = (
            f"{error.strerror or error}: rank {rank} needs {needed_gib:.2f} GiB for optimizer state{free_text}; "
            "choose a directory on another disk, shard over more ranks or use parallel.offload=cpu"
        )
        raise OffloadError("parallel.offload_dir", directory, config.origin("parallel.offload_dir"), remedy) from error


def compute_file_bytes(slices: Slices, kinds: Sequence[str], dtype: torch.dtype | None = None) -> int:
    """Return the size of the file that holds the moments of these slices. `dtype`: of the moments."""
    sizes = (tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in slices.values())
    return sum(round_up_to_page(size) for size in sizes) * len(kinds)


def _list_moments(chunk: OptimizerChunk) -> list[Tensor]:
    return [tensor for tensors in chunk.moments.values() for tensor in tensors]


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    """Start a copy to page-locked memory, which torch reuses once its copies are done."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def flatten(tensor: Tensor) -> Tensor:
    """Return a 1-dimensional view of the elements in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _match_layout(weight: Tensor, gradient: Tensor) -> Tensor:
    """Return a gradient in the memory order of its weight, as the CPU kernel expects."""
    has_same_layout = gradient.stride() == weight.stride() or (gradient.is_contiguous() and weight.is_contiguous())
    return gradient if has_same_layout else torch.empty_like(weight).copy_(gradient)


def check_dense(slices: Slices) -> None:
    """Raise ModelError if there are gaps between the elements of a weight: fused kernels would write into them."""
    for name, tensor in slices.items():
        if tensor.numel() and not is_dense(tensor):
            raise ModelError(f"{name}: elements with gaps between them cannot be updated; make it contiguous")


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill a range of memory without gaps, in any order."""
    last_offset = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last_offset + 1 == tensor.numel()
