"""What is trained: a module, its first weights, and the summed loss of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raytrain_hpc.config import Config
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.model.initial import initial_tensor
from raytrain_hpc.shape import ModelShape
from raytrain_hpc.state.rng import position_keys, sample_keys, seed_for

ModelFactory = Callable[[Config], nn.Module]
LossFunction = Callable[[Any, Tensor], Tensor]


class Task(Protocol):
    """A model and its loss, knowing nothing of ranks."""

    keyed_randomness: bool

    def build(self) -> nn.Module:
        """The module, on the meta device where `initial` can fill it, else with its first weights."""

    def initial(self, name: str, shape: torch.Size) -> Tensor | None:
        """The whole first value of a parameter, None where `build` already gave it."""

    def loss(self, forward: nn.Module, inputs: Tensor, targets: Tensor, step: int, samples: Tensor) -> Tensor:
        """Sum of the losses over the valid targets of a microbatch (inputs and targets [b, t], samples [b])."""


@dataclass
class DecoderTask:
    """The platform's own decoder on next-token prediction."""

    shape: ModelShape
    seed: int
    positions: list[int]  # of a sequence, that this rank reads
    rows: list[int]  # of its positions, that it holds between the products
    loss_function: Callable[[Tensor, Tensor], Tensor] = loss_sum
    keyed_randomness: bool = True

    def build(self) -> nn.Module:
        """The decoder without storage; its weights are a function of seed and name."""
        with torch.device("meta"):
            return Decoder(self.shape)

    def initial(self, name: str, shape: torch.Size) -> Tensor | None:
        """Whole first value of the parameter `name`."""
        return initial_tensor(self.shape, name, shape, self.seed)

    def loss(self, forward: nn.Module, inputs: Tensor, targets: Tensor, step: int, samples: Tensor) -> Tensor:
        """Cross-entropy summed over the targets; dropout bits come from (seed, step, sample)."""
        dropping = forward.training and self.shape.dropout > 0
        keys = None
        if dropping:
            rows = torch.tensor(self.rows, device=inputs.device)
            keys = position_keys(sample_keys(self.seed, step, samples), rows)
        if len(self.positions) == inputs.shape[1]:
            return self.loss_function(forward(inputs, keys), targets)
        mine = torch.tensor(self.positions, device=inputs.device)
        return self.loss_function(forward(inputs[:, mine], keys, mine), targets[:, mine])


@dataclass
class CustomTask:
    """A user's module and loss. Random bits come from torch's generator, seeded by (seed, step, first sample)."""

    factory: ModelFactory
    loss_function: LossFunction
    config: Config
    keyed_randomness: bool = False

    def build(self) -> nn.Module:
        """Call the user's factory under the run's seed. Raises ModelError where it gives no module."""
        torch.manual_seed(seed_for(self.config.run.seed, "model"))
        module = self.factory(self.config)
        if not isinstance(module, nn.Module):
            raise ModelError(f"model: the factory returned {type(module).__name__}; return a torch.nn.Module")
        if not any(True for _ in module.parameters()):
            raise ModelError("model: the module has no parameters to train")
        if strays := [name for name, tensor in module.state_dict().items() if tensor.is_meta]:
            raise ModelError(f"model: {strays[0]} is on the meta device; the factory must give the first weights")
        return module

    def initial(self, name: str, shape: torch.Size) -> Tensor | None:
        """Nothing: the factory gave the weights."""
        return None

    def loss(self, forward: nn.Module, inputs: Tensor, targets: Tensor, step: int, samples: Tensor) -> Tensor:
        """The user's loss on the module's output. Raises ModelError where it is not a scalar sum."""
        torch.manual_seed(seed_for(self.config.run.seed, step, int(samples[0])))
        value = self.loss_function(forward(inputs), targets)
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ModelError("loss: return a scalar tensor, the sum of the losses over the valid targets")
        return value
