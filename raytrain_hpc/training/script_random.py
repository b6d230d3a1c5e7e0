"""Random generators of a user's script: saved with every step, and kept equal on all ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from raytrain_hpc.data.samples.sample_reader import restore_generators, seed_generators
from raytrain_hpc.distributed.process_groups import ParallelContext
from raytrain_hpc.state.keyed_rng import derive_seed
from raytrain_hpc.torch_device import get_device_module, is_accelerator, seed_device

_TORCH_BYTES = 5056  # torch's CPU generator
_PYTHON_WORDS, _NUMPY_WORDS = 625, 624
_NUM_BYTES = _TORCH_BYTES + 4 * (_PYTHON_WORDS + _NUMPY_WORDS + 4) + 16


class ScriptGenerators:
    """State of the generators of torch (CPU), NumPy and `random` after a step, as one byte tensor.

    All ranks take the state of rank 0, so that they draw the same batches. A module's forward pass draws from a stream
    of its own on each rank, since ranks have different rows.
    """

    def __init__(self, seed: int, context: ParallelContext, *, is_elastic: bool):
        self._seed, self._group, self._device, self._is_elastic = seed, context.world_group, context.device, is_elastic
        self._stream = 0 if is_elastic else context.rank  # ranks that must draw alike share one
        self.state = torch.zeros(_NUM_BYTES, dtype=torch.uint8)
        self._depth = 0
        self.begin_step(0)

    def capture(self) -> None:
        """Take over the states of this rank's generators."""
        self.state.copy_(pack_generators())

    def sync(self) -> None:
        """Give the generators of all ranks the states of rank 0. Collective. Call after `capture`."""
        if self._group is not None:
            self.sync_state()
            unpack_generators(self.state)

    def sync_state(self) -> None:
        """Give all ranks the states that rank 0 has captured; the generators themselves keep theirs. Collective."""
        if self._group is not None:
            received = self.state.to(self._device)
            dist.broadcast(received, group=self._group, group_src=0)
            self.state.copy_(received)

    def restore(self) -> None:
        """Set the generators to the saved states. Call before the first step of a resumed run."""
        if bool(self.state.any()):  # checkpoints of earlier versions have none
            unpack_generators(self.state)

    def begin_step(self, step: int) -> None:
        """Begin the streams of a step: this rank's own one, and that of the GPU."""
        key = derive_seed(self._seed, "script", step, self._stream)
        self._local_state = torch.Generator().manual_seed(key).get_state()
        seed_device(self._device, key)

    def isolate_forward(self, module: nn.Module) -> None:
        """Let forward passes of a module draw from their own stream. Does nothing on one rank, unless `is_elastic`."""
        if self._group is None and not self._is_elastic:
            return
        module.register_forward_pre_hook(lambda module, inputs: self._enter())
        module.register_forward_hook(lambda module, inputs, output: self._exit(), always_call=True)

    @contextmanager
    def isolate_microbatches(self) -> Iterator[Callable[[int, int, int], None]]:
        """Yield a function that seeds the generators for a microbatch, if `is_elastic`; restore them at the end.

        Its arguments are the step, the number of the loop over microbatches in the step, and that of the microbatch.
        Forward passes inside draw from the same generators.
        """
        if not self._is_elastic:
            yield lambda step, loop, microbatch: None
            return
        self._depth += 1  # forward passes do not change the stream
        try:
            with keep_generators(self._device):
                yield self._seed_microbatch
        finally:
            self._depth -= 1

    def _seed_microbatch(self, step: int, loop: int, microbatch: int) -> None:
        key = derive_seed(self._seed, "script microbatch", step, loop, microbatch)
        seed_generators(key)
        seed_device(self._device, key)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._shared_state = torch.get_rng_state()
            torch.set_rng_state(self._local_state)

    def _exit(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._local_state = torch.get_rng_state()
            torch.set_rng_state(self._shared_state)


@contextmanager
def keep_generators(device: torch.device) -> Iterator[None]:
    """Restore the generators of torch (CPU and `device`), NumPy and `random` at the end of the context."""
    module = get_device_module(device) if is_accelerator(device) else None
    state = None if module is None else module.get_rng_state(device)
    try:
        with restore_generators():
            yield
    finally:
        if module is not None:
            module.set_rng_state(state, device)


def pack_generators() -> Tensor:
    """Return the states of the generators of torch (CPU), `random` and NumPy as bytes."""
    _, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=True)
    _, numpy_words, position, has_gauss, cached = numpy_state
    small = np.array([position, has_gauss, gauss is not None, 0], dtype=np.uint32)
    floats = np.array([cached, 0.0 if gauss is None else gauss], dtype=np.float64)
    arrays = (np.array(words, dtype=np.uint32), numpy_words.astype(np.uint32), small, floats)
    parts = [torch.get_rng_state(), *(torch.frombuffer(bytearray(a.tobytes()), dtype=torch.uint8) for a in arrays)]
    return torch.cat(parts)


def unpack_generators(state: Tensor) -> None:
    """Set the generators to states that `pack_generators` returned."""
    content = state.numpy().tobytes()
    torch.set_rng_state(state[:_TORCH_BYTES].clone())
    end = _TORCH_BYTES + 4 * (_PYTHON_WORDS + _NUMPY_WORDS + 4)
    words = np.frombuffer(content[_TORCH_BYTES:end], dtype=np.uint32)
    cached, gauss = np.frombuffer(content[end:], dtype=np.float64).tolist()
    position, has_gauss, has_python_gauss, _ = words[-4:].tolist()
    random.setstate((3, tuple(words[:_PYTHON_WORDS].tolist()), gauss if has_python_gauss else None))
    numpy_words = words[_PYTHON_WORDS : _PYTHON_WORDS + _NUMPY_WORDS].copy()
    np.random.set_state(("MT19937", numpy_words, position, has_gauss, cached))
