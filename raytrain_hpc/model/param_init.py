"""Parameter initialization as a pure function of (seed, name), so that any rank can initialize any tensor."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.cpu_limits import count_usable_cpus
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.state.keyed_rng import derive_seed

T = TypeVar("T")

_RESIDUAL = ("attention.out.weight", "down.weight", "experts.down")
_TABLES = ("embedding.weight", "positions.weight", "head.weight")
_NORMAL = (*_TABLES, "qkv.weight", "gate.weight", "up.weight", "router.weight", "experts.gate", "experts.up")
_MAX_THREADS = 8  # it bounds the whole tensors in memory
_THREAD_MIN_ELEMENTS = 1 << 18  # drawn in 2 ms; small models start no thread


def init_tensor(spec: ModelSpec, name: str, size: Sequence[int], seed: int) -> Tensor:
    """Return the initial value of a Decoder parameter, as the full tensor in fp32 on CPU.

    name: canonical name; size: full shape. The scheme of GPT-2 (Radford et al. 2019): weights are normal(0, init_std),
    divided by sqrt(2 num_layers) if they write to the residual stream; norms are one, biases zero. Values are drawn in
    fp32, so that they do not depend on the dtype of the run. Raises ModelError for an unknown name.
    """
    if name.endswith("bias") or ".lora_B." in name:
        return torch.zeros(*size)
    if ".lora_A." in name:  # as in peft and nn.Linear
        generator, bound = torch.Generator().manual_seed(derive_seed(seed, name)), size[1] ** -0.5
        return torch.empty(*size).uniform_(-bound, bound, generator=generator)
    if name.endswith("norm.weight"):
        return torch.ones(*size)
    if not name.endswith(_RESIDUAL + _NORMAL):
        raise ModelError(f"{name}: no initial value is defined for this parameter")
    std = spec.init_std
    if name.endswith(_RESIDUAL):
        std /= (2 * spec.num_layers) ** 0.5
    generator = torch.Generator().manual_seed(derive_seed(seed, name))
    return torch.empty(*size).normal_(0.0, std, generator=generator)


@torch.no_grad()
def init_weights(decoder: Decoder, seed: int, num_threads: int = 1) -> None:
    """Initialize all parameters of an unsharded Decoder, in place. On the meta device, call `to_empty` first.

    `num_threads`: see `init_tensors`. The values do not depend on it.
    """
    parameters = dict(decoder.named_parameters())

    def draw(name: str, size: torch.Size) -> Tensor:
        return init_tensor(decoder.spec, name, size, seed)

    def copy(name: str, value: Tensor) -> None:
        parameters[name].copy_(value)

    init_tensors({name: parameter.shape for name, parameter in parameters.items()}, draw, copy, num_threads)


def init_tensors(
    sizes: Mapping[str, torch.Size],
    draw: Callable[[str, torch.Size], T],
    copy: Callable[[str, T], None],
    num_threads: int,
) -> None:
    """Call `copy(name, draw(name, size))` for every tensor of `sizes`; threads draw the large ones ahead of the copies.

    The largest come first, so that tensors drawn at the same time are of about the same size. At most `num_threads`
    large tensors are in memory, with the one being copied. `copy` runs in the calling thread, and so does `draw` of
    small tensors, or of all with one thread. An error of `draw` or `copy` is raised unchanged, and later tensors are
    not copied.
    """
    large: list[str] = []
    small: list[str] = []
    for name, size in sizes.items():
        (large if num_threads > 1 and size.numel() >= _THREAD_MIN_ELEMENTS else small).append(name)
    large.sort(key=lambda name: sizes[name].numel(), reverse=True)
    waiting, futures = deque(large), dict[str, Future[T]]()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="param-init") as pool:  # without calls, no thread
        for name in large:
            while waiting and len(futures) < num_threads:
                next_name = waiting.popleft()
                futures[next_name] = pool.submit(draw, next_name, sizes[next_name])
            copy(name, futures.pop(name).result())
    for name in small:
        copy(name, draw(name, sizes[name]))


def count_init_threads(num_processes: int) -> int:
    """Return the number of threads for `init_tensors` in each of `num_processes` that initialize on this machine."""
    return min(_MAX_THREADS, max(1, count_usable_cpus() // num_processes))
