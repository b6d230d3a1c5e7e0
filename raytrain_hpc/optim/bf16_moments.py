"""Optimizer moments in bf16: half the memory of fp32 moments (optimizer.moment_dtype).

torch's fused kernels take moments of the dtype of the weights only. Moments are therefore widened for the update and
rounded to the nearest bf16 number afterwards, chunk by chunk, so that few of them are in fp32 at a time. A change that
is smaller than half the spacing of bf16 numbers is lost: config/validation.py limits the decay rates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from raytrain_hpc.optim.mmap_buffer import PAGE
from raytrain_hpc.optim.offload import MomentStorage, OptimizerChunk, Slices, flatten
from raytrain_hpc.torch_private import foreach_copy_

WIDE_BYTES = 256 * 2**20  # of moments that are widened at a time


class Bf16Moments:
    """Moments of a storage in bf16, which the chunks have in the dtype of the weights. Implements `MomentStorage`."""

    def __init__(self, storage: MomentStorage, wide_bytes: int = WIDE_BYTES):
        self._storage, self._wide_bytes = storage, wide_bytes
        self.slices, self.moments = storage.slices, storage.moments

    def iter_chunks(self, gradients: Slices, targets: Slices | None = None) -> Iterator[OptimizerChunk]:
        """Yield the chunks of the storage in parts of at most `wide_bytes` of moments in the dtype of the weights."""
        for chunk in self._storage.iter_chunks(gradients, targets):
            for part in self._split(chunk):
                wide = {
                    kind: [moment.to(weight.dtype) for moment, weight in zip(moments, part.weights, strict=True)]
                    for kind, moments in part.moments.items()
                }
                yield replace(part, moments=wide)
                for kind, moments in part.moments.items():
                    foreach_copy_(list(moments), wide[kind])
                del wide  # before the next part is widened

    def release_memory(self) -> None:
        """Release the memory that reading or filling moments took."""
        self._storage.release_memory()

    def make_temporary(self, slices: Slices) -> MomentStorage:
        """Implement `MomentStorage.make_temporary`."""
        return Bf16Moments(self._storage.make_temporary(slices), self._wide_bytes)

    def _split(self, chunk: OptimizerChunk) -> Iterator[OptimizerChunk]:
        """Yield a chunk in parts: of large tensors, or several small ones."""
        selected, used_bytes = list[tuple[int, slice | None]](), 0
        for index, weight in enumerate(chunk.weights):
            bytes_per_element = weight.dtype.itemsize * len(chunk.moments)
            max_elements = max(PAGE, self._wide_bytes // bytes_per_element // PAGE * PAGE)
            for run in _list_runs(_list_tensors(chunk, index), max_elements):
                count = weight.numel() if run is None else run.stop - run.start
                if selected and used_bytes + count * bytes_per_element > self._wide_bytes:
                    yield _select(chunk, selected)
                    selected, used_bytes = [], 0
                selected.append((index, run))
                used_bytes += count * bytes_per_element
        if selected:
            yield _select(chunk, selected)


def _list_tensors(chunk: OptimizerChunk, index: int) -> list[Tensor]:
    return [chunk.weights[index], chunk.gradients[index], *(moments[index] for moments in chunk.moments.values())]


def _list_runs(tensors: Sequence[Tensor], max_elements: int) -> list[slice | None]:
    """Return runs of at most `max_elements` elements of tensors of one shape, in memory order.

    None: all elements, if the tensors differ in that order.
    """
    count = tensors[0].numel()
    if any(tensor.stride() != tensors[0].stride() for tensor in tensors):
        return [None]
    return [slice(start, min(start + max_elements, count)) for start in range(0, count, max_elements)]


def _select(chunk: OptimizerChunk, selected: Sequence[tuple[int, slice | None]]) -> OptimizerChunk:
    """Return a chunk of views: runs of elements of the tensors at some indexes."""

    def view(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensors[index] if run is None else flatten(tensors[index])[run] for index, run in selected]

    moments = {kind: view(of_kind) for kind, of_kind in chunk.moments.items()}
    names = [chunk.names[index] for index, _ in selected] if chunk.names else ()
    return OptimizerChunk(view(chunk.weights), view(chunk.gradients), moments, names)
