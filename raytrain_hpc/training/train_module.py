"""What is trained: a module, its first weights, and the summed loss of one microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.model.param_init import init_tensor
from raytrain_hpc.runtime.worker_spec import LossFunction, ModelFactory
from raytrain_hpc.state.keyed_rng import derive_position_keys, derive_sample_keys, derive_seed


@dataclass(frozen=True, eq=False)
class Batch:
    """A microbatch on the device: inputs and targets int64 [b, t], samples int64 [b], documents int64 [b, t] where
    there are several in a row, and its valid targets.

    A spare one is run because other ranks run one, and counts for nothing.
    """

    inputs: Tensor
    targets: Tensor
    samples: Tensor
    documents: Tensor | None
    num_tokens: int
    is_padding: bool = False

    @property
    def loss_weight(self) -> float:
        """0 for a spare one, else 1."""
        return 0.0 if self.is_padding else 1.0


class TrainModule(Protocol):
    """A model and its loss, knowing nothing of ranks."""

    keyed_randomness: bool

    def build(self, stage: int) -> nn.Module:
        """A stage of the module, on the meta device where `initial` can fill it, else with its first weights."""

    def init_param(self, name: str, shape: torch.Size) -> Tensor | None:
        """The whole first value of a parameter, None where `build` already gave it."""

    def forward(self, module: nn.Module, x: Tensor, step: int, batch: Batch) -> Tensor:
        """What a stage makes of x: the batch's inputs for the first one, else what the one before made."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Sum of the losses over the valid targets int64 [b, t] of a microbatch, from what the last stage made."""


@dataclass
class DecoderTrainModule:
    """The platform's own decoder on next-token prediction."""

    model_spec: ModelSpec
    seed: int
    positions: list[int]  # of a sequence, that this rank reads
    shard_positions: list[int]  # of its positions, that it holds between the products
    stage_layers: list[range]  # the layers of each
    loss_function: Callable[[Tensor, Tensor], Tensor] = loss_sum
    keyed_randomness: bool = True

    def build(self, stage: int) -> nn.Module:
        """A stage of the decoder without storage; its weights are a function of seed and name."""
        with torch.device("meta"):
            return Decoder(self.model_spec, self.stage_layers[stage])

    def init_param(self, name: str, shape: torch.Size) -> Tensor | None:
        """Whole first value of the parameter `name`."""
        return init_tensor(self.model_spec, name, shape, self.seed)

    def forward(self, module: nn.Module, x: Tensor, step: int, batch: Batch) -> Tensor:
        """Logits, or the residual stream between two stages; dropout bits come from (seed, step, sample)."""
        keys = None
        if module.training and self.model_spec.dropout > 0:
            rows = torch.tensor(self.shard_positions, device=x.device)
            keys = derive_position_keys(derive_sample_keys(self.seed, step, batch.samples), rows)
        positions = None  # whole sequences of tokens speak for themselves
        if x.is_floating_point() or len(self.positions) < x.shape[1]:
            positions = torch.tensor(self.positions, device=x.device)
            x = x if x.is_floating_point() else x[:, positions]
        if batch.documents is not None:
            within = compute_document_positions(batch.documents)
            positions = within if positions is None else within[:, positions]
        output: Tensor = module(x, keys, positions, documents=batch.documents, loss_weight=batch.loss_weight)
        return output

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over the targets."""
        if len(self.positions) < targets.shape[1]:
            targets = targets[:, torch.tensor(self.positions, device=targets.device)]
        return self.loss_function(output, targets)


def compute_document_positions(documents: Tensor) -> Tensor:
    """How far each position of documents int64 [b, t] is from where its document begins in the row, int64 [b, t]."""
    here = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return here - torch.where(begins, here, 0).cummax(dim=1).values


@dataclass
class CustomTrainModule:
    """A user's module and loss. Random bits come from torch's generator, seeded by (seed, step, first sample)."""

    factory: ModelFactory
    loss_function: LossFunction
    config: Config
    keyed_randomness: bool = False

    def build(self, stage: int) -> nn.Module:
        """Call the user's factory under the run's seed. Raises ModelError where it gives no module."""
        torch.manual_seed(derive_seed(self.config.run.seed, "model"))
        module = self.factory(self.config)
        if not isinstance(module, nn.Module):
            raise ModelError(f"model: the factory returned {type(module).__name__}; return a torch.nn.Module")
        if not any(True for _ in module.parameters()):
            raise ModelError("model: the module has no parameters to train")
        if strays := [name for name, tensor in module.state_dict().items() if tensor.is_meta]:
            raise ModelError(f"model: {strays[0]} is on the meta device; the factory must give the first weights")
        return module

    def init_param(self, name: str, shape: torch.Size) -> Tensor | None:
        """Nothing: the factory gave the weights."""
        return None

    def forward(self, module: nn.Module, x: Tensor, step: int, batch: Batch) -> Any:
        """Whatever the user's module returns."""
        torch.manual_seed(derive_seed(self.config.run.seed, step, int(batch.samples[0])))
        return module(x)

    def loss(self, output: Any, targets: Tensor) -> Tensor:
        """The user's loss on the module's output. Raises ModelError where it is not a scalar sum."""
        value = self.loss_function(output, targets)
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ModelError("loss: return a scalar tensor, the sum of the losses over the valid targets")
        return value
