"""Where the optimizer's moments live, and how a step comes to them: with the weights, in host memory, on disk.

ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840) and ZeRO-Infinity's optimizer on NVMe (Rajbhandari et al. 2021, arXiv
2104.07857): moments stay off the device, and the CPU steps them. The weights on the device are those that the optimizer
steps, in fp32, so the host keeps no second copy, which a load could leave stale: a chunk of them comes with its
gradients, through page-locked memory, and goes back. A CPU's kernel and a GPU's agree to rounding; on a CPU every home
gives the same bits.

Loading and saving reach all moments. What that brings into memory is given back afterwards (`Home.rest`); before that,
the kernel can take it, as it is a file's. Saving copies a rank's share of the state into memory that it keeps for the
next time, wherever moments live, because the next step changes them while they are being written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ModelError, OffloadError
from raytrain_hpc.optim.mmap_buffer import PAGE, MmapBuffer, get_free_bytes, round_up_to_page

CHUNK_BYTES = 32 * 2**20  # of moments that a step works on at a time

Slices = Mapping[str, Tensor]


@dataclass(frozen=True)
class OptimizerChunk:
    """What one call of the optimizer's kernel steps: lists of equal length, moments by kind."""

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor]
    moments: Mapping[str, Sequence[Tensor]]


class MomentStorage(Protocol):
    """Where moments live. `slices` are the weights on the device; moments have their names, shapes and types."""

    slices: Slices
    moments: dict[str, dict[str, Tensor]]

    def iter_chunks(self, gradients: Slices) -> Iterator[OptimizerChunk]:
        """Everything that these gradients step, a part at a time: a part is stepped before the next one is asked for.

        After the last one the weights on the device are the new ones.
        """

    def release_memory(self) -> None:
        """Give back memory that reading or filling moments took."""


class OnDevice:
    """Moments beside the weights: one part, nothing moves."""

    def __init__(self, slices: Slices, kinds: Iterable[str]):
        self.slices = slices
        self.moments = {kind: {name: torch.zeros_like(s) for name, s in slices.items()} for kind in kinds}

    def iter_chunks(self, gradients: Slices) -> Iterator[OptimizerChunk]:
        """All at once."""
        if gradients:
            weights = [self.slices[name] for name in gradients]
            laid_out = [_match_layout(self.slices[name], one) for name, one in gradients.items()]
            yield OptimizerChunk(
                weights, laid_out, {kind: [of[name] for name in gradients] for kind, of in self.moments.items()}
            )

    def release_memory(self) -> None:
        """They are where they belong."""


class CpuOffload:
    """Moments in host memory. Weights and gradients of a chunk come to it, and new weights go back."""

    def __init__(self, slices: Slices, kinds: Sequence[str], chunk_bytes: int = CHUNK_BYTES):
        self.slices, self._kinds, self._chunk_bytes = slices, kinds, chunk_bytes
        for name, tensor in slices.items():
            if tensor.numel() and not _is_dense(tensor):
                raise ModelError(f"{name}: elements with gaps between them cannot be offloaded; make it contiguous")
        self.moments: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds}
        for name, tensor in slices.items():
            for kind in kinds:
                flat = self._allocate_zeros(tensor.numel(), tensor.dtype)
                self.moments[kind][name] = flat.as_strided(tensor.shape, tensor.stride())

    def iter_chunks(self, gradients: Slices) -> Iterator[OptimizerChunk]:
        """Chunks of at most `chunk_bytes` of moments."""
        flat = {name: _flatten(_match_layout(self.slices[name], one)) for name, one in gradients.items()}
        chunks = [self._make_chunk(chunk, flat) for chunk in self._plan_chunks(gradients)]
        for number, part in enumerate(chunks):
            self._prefetch(chunks[number + 1 : number + 2])
            near = self._to_host(part)
            yield near
            for there, here in zip(part.weights, near.weights, strict=True):
                if there is not here:
                    there.copy_(here, non_blocking=True)
            self._post_step(part)

    def release_memory(self) -> None:
        """Host memory stays."""

    def _allocate_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(count, dtype=dtype)

    def _prefetch(self, chunks: Sequence[OptimizerChunk]) -> None:
        """Called when these, if there are any, come next after the part that is about to be stepped."""

    def _post_step(self, chunk: OptimizerChunk) -> None:
        """Called when a part has been stepped."""

    def _to_host(self, chunk: OptimizerChunk) -> OptimizerChunk:
        """A part with weights and gradients in host memory."""
        devices = {weight.device for weight in chunk.weights if weight.is_cuda}
        if not devices:
            return chunk
        near = OptimizerChunk(
            [_copy_to_pinned(w) for w in chunk.weights], [_copy_to_pinned(g) for g in chunk.gradients], chunk.moments
        )
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return near

    def _make_chunk(self, runs: Sequence[tuple[str, slice]], gradients: Slices) -> OptimizerChunk:
        weights = [_flatten(self.slices[name])[run] for name, run in runs]
        moments = {kind: [_flatten(of[name])[run] for name, run in runs] for kind, of in self.moments.items()}
        return OptimizerChunk(weights, [gradients[name][run] for name, run in runs], moments)

    def _plan_chunks(self, names: Iterable[str]) -> Iterator[list[tuple[str, slice]]]:
        """Runs of elements, several to a chunk where tensors are small.

        Cuts are multiples of a page's number of bytes in elements: so they are at whole pages of a file, and the
        kernel's vectors stay whole, which keeps the bits.
        """
        chunk, room = list[tuple[str, slice]](), self._chunk_bytes
        for name in names:
            tensor = self.slices[name]
            width = tensor.dtype.itemsize * len(self._kinds)
            most = max(PAGE, self._chunk_bytes // width // PAGE * PAGE)
            for start in range(0, tensor.numel(), most):
                stop = min(start + most, tensor.numel())
                needs = round_up_to_page((stop - start) * tensor.dtype.itemsize) * len(self._kinds)
                if chunk and needs > room:
                    yield chunk
                    chunk, room = [], self._chunk_bytes
                chunk.append((name, slice(start, stop)))
                room -= needs
        if chunk:
            yield chunk


class DiskOffload(CpuOffload):
    """Moments in a mapped file, of which a step has one chunk in this process's memory, while the next is being read.

    Raises OSError where the directory has no room for them.
    """

    def __init__(self, slices: Slices, kinds: Sequence[str], directory: str, chunk_bytes: int = CHUNK_BYTES):
        self._buffer = MmapBuffer(directory, compute_file_bytes(slices, kinds))
        super().__init__(slices, kinds, chunk_bytes)

    def release_memory(self) -> None:
        """All pages back to the file."""
        self._buffer.release_all()

    def _allocate_zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        return self._buffer.zeros(count, dtype)

    def _prefetch(self, chunks: Sequence[OptimizerChunk]) -> None:
        self._buffer.prefetch([tensor for part in chunks for tensor in _list_moments(part)])

    def _post_step(self, chunk: OptimizerChunk) -> None:
        self._buffer.release(_list_moments(chunk))


def make_moment_storage(config: Config, slices: Slices, kinds: Sequence[str], rank: int) -> MomentStorage:
    """The home that the settings ask for. Raises OffloadError where it has no room."""
    where, directory = config.parallel.offload, config.parallel.offload_dir
    on_host = all(tensor.device.type == "cpu" for tensor in slices.values())
    if where == "none" or (where == "cpu" and on_host):
        return OnDevice(slices, kinds)
    if where == "cpu":
        return CpuOffload(slices, kinds)
    try:
        return DiskOffload(slices, kinds, directory)
    except OSError as error:
        free = get_free_bytes(directory)
        room = "" if free is None else f" ({free / 2**30:.2f} GiB are free)"
        needs = compute_file_bytes(slices, kinds) / 2**30
        remedy = (
            f"{error.strerror or error}: rank {rank} keeps {needs:.2f} GiB of optimizer state there{room}; choose a "
            "directory on another disk, shard over more ranks or use parallel.offload=cpu"
        )
        raise OffloadError("parallel.offload_dir", directory, config.origin("parallel.offload_dir"), remedy) from error


def compute_file_bytes(slices: Slices, kinds: Sequence[str]) -> int:
    """Size of the file that holds moments of these slices."""
    return sum(round_up_to_page(tensor.nbytes) for tensor in slices.values()) * len(kinds)


def _list_moments(chunk: OptimizerChunk) -> list[Tensor]:
    return [tensor for of_kind in chunk.moments.values() for tensor in of_kind]


def _copy_to_pinned(tensor: Tensor) -> Tensor:
    """A copy under way to page-locked memory, which torch keeps and deals out again when the copies are done."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _flatten(tensor: Tensor) -> Tensor:
    """The elements in the order of memory, without a copy."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _match_layout(weight: Tensor, gradient: Tensor) -> Tensor:
    """A gradient in the order of memory of its weight, the only one that the CPU's kernel looks at."""
    same = gradient.stride() == weight.stride() or (gradient.is_contiguous() and weight.is_contiguous())
    return gradient if same else torch.empty_like(weight).copy_(gradient)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a run of memory, in any order."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel()
