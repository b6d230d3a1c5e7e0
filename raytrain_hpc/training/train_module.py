"""Train modules: a model with its initial weights, forward pass and summed loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from raytrain_hpc.config.model_spec import ModelSpec
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ModelError
from raytrain_hpc.model.cross_entropy import IGNORE_INDEX
from raytrain_hpc.model.decoder import Decoder, loss_sum
from raytrain_hpc.model.document_positions import compute_document_positions
from raytrain_hpc.model.param_init import init_tensor
from raytrain_hpc.runtime.worker_spec import ForwardFunction, LossFunction, ModelFactory
from raytrain_hpc.state.keyed_rng import derive_position_keys, derive_sample_keys, derive_seed
from raytrain_hpc.training.loss_check import LossCheck


@dataclass(frozen=True, eq=False)
class Batch:
    """A microbatch on the device.

    `inputs`, `targets`: int64 [b, t]. `samples`: sample numbers, int64 [b]. `documents`: document numbers, int64
    [b, t], if rows hold several documents. `num_tokens`: the number of valid targets. `is_padding`: the microbatch runs
    only because other ranks run one, and has weight zero.
    """

    inputs: Tensor
    targets: Tensor
    samples: Tensor
    documents: Tensor | None
    num_tokens: int
    is_padding: bool = False

    def find_used_positions(self) -> Tensor:
        """Return the positions that a target depends on, bool [b, t]: in a row, those up to the last target.

        Those that pad a row are not among them. A padding microbatch has none.
        """
        if self.is_padding:
            return torch.zeros_like(self.targets, dtype=torch.bool)
        numbers = torch.arange(1, self.targets.shape[1] + 1, device=self.targets.device)
        last_target = torch.where(self.targets == IGNORE_INDEX, 0, numbers).amax(dim=1, keepdim=True)
        return numbers <= last_target


@dataclass(frozen=True, eq=False)
class SampleBatch:
    """A microbatch of a user's dataset. `inputs`: what its collate function returned, with tensors on the device.

    `samples`: sample numbers, int64 [b], on the CPU. `is_padding`: as of `Batch`.
    """

    inputs: Any
    samples: Tensor
    is_padding: bool = False


AnyBatch: TypeAlias = Batch | SampleBatch
# The sum of losses, and the number of targets or samples that it is divided by.
LossSum: TypeAlias = tuple[Tensor, int | float | Tensor]


class TrainModule(Protocol):
    """A model and its loss, independent of the layout."""

    keyed_randomness: bool

    def build(self, stage: int) -> nn.Module:
        """Build a pipeline stage: on the meta device if `init_param` can fill it, else with its initial weights."""

    def init_param(self, name: str, shape: torch.Size) -> Tensor | None:
        """Return the initial value of a whole parameter; None if `build` already set it."""

    def forward(self, module: nn.Module, x: Any, step: int, batch: Any) -> Any:
        """Run a stage. `x`: the batch's inputs for the first stage, else the output of the previous stage."""

    def loss(self, output: Any, batch: Any) -> LossSum:
        """Return the sum of losses and the number of valid targets, from the output of the last stage."""


@dataclass
class DecoderTrainModule:
    """The decoder, trained on next-token prediction."""

    model_spec: ModelSpec
    seed: int
    positions: list[int]  # of a sequence, read by this rank
    shard_positions: list[int]  # those of them that it holds in the residual stream (fewer under tensor parallelism)
    stage_layers: list[range]  # layers of each pipeline stage
    loss_function: Callable[[Tensor, Tensor], Tensor] = loss_sum
    keyed_randomness: bool = True

    def build(self, stage: int) -> nn.Module:
        """Build a stage of the decoder on the meta device. Its weights are a function of seed and name."""
        with torch.device("meta"):
            return Decoder(self.model_spec, self.stage_layers[stage])

    def init_param(self, name: str, shape: torch.Size) -> Tensor | None:
        """Return the initial value of the whole parameter `name`."""
        return init_tensor(self.model_spec, name, shape, self.seed)

    def forward(self, module: nn.Module, x: Tensor, step: int, batch: Batch) -> Tensor:
        """Return logits or the sum of losses (see `model.decoder.Head`), or the residual stream between stages.

        Dropout bits are keyed by (seed, step, sample).
        """
        keys = None
        if module.training and self.model_spec.dropout > 0:
            shard_positions = torch.tensor(self.shard_positions, device=x.device)
            keys = derive_position_keys(derive_sample_keys(self.seed, step, batch.samples), shard_positions)
        positions = None  # None: positions 0 to t - 1
        if x.is_floating_point() or len(self.positions) < x.shape[1]:
            positions = torch.tensor(self.positions, device=x.device)
            x = x if x.is_floating_point() else x[:, positions]
        if batch.documents is not None:
            document_positions = compute_document_positions(batch.documents)
            positions = document_positions if positions is None else document_positions[:, positions]
        targets = self._select(batch.targets)
        counted = self._select(batch.find_used_positions()) if self.model_spec.num_experts else None
        output: Tensor = module(x, keys, positions, documents=batch.documents, counted=counted, targets=targets)
        return output

    def loss(self, output: Tensor, batch: Batch) -> LossSum:
        """Return the cross-entropy summed over the targets, and their number in whole sequences."""
        is_loss = output.ndim == 0  # computed by the head, in chunks
        return output if is_loss else self.loss_function(output, self._select(batch.targets)), batch.num_tokens

    def _select(self, values: Tensor) -> Tensor:
        """Return the values [b, t] of the positions that this rank reads."""
        if len(self.positions) == values.shape[1]:
            return values
        return values[:, torch.tensor(self.positions, device=values.device)]


@dataclass
class CustomTrainModule:
    """A user's module and loss. Random bits come from torch's generator, seeded by (seed, step, first sample)."""

    factory: ModelFactory
    loss_function: LossFunction
    config: Config
    run: ForwardFunction | None = None
    loss_check: LossCheck | None = None  # of the first loss of a run
    keyed_randomness: bool = False

    def build(self, stage: int) -> nn.Module:
        """Call the user's factory under the run's seed. Raises ModelError if it does not return a trainable module."""
        torch.manual_seed(derive_seed(self.config.run.seed, "model"))
        module = self.factory(self.config)
        if not isinstance(module, nn.Module):
            raise ModelError(f"model: the factory returned {type(module).__name__}; return a torch.nn.Module")
        if not any(True for _ in module.parameters()):
            raise ModelError("model: the module has no parameters to train")
        if meta_names := [name for name, tensor in module.state_dict().items() if tensor.is_meta]:
            raise ModelError(f"model: {meta_names[0]} is on the meta device; the factory must return initial weights")
        return module

    def init_param(self, name: str, shape: torch.Size) -> Tensor | None:
        """Return None: the factory set the weights."""
        return None

    def forward(self, module: nn.Module, x: Any, step: int, batch: AnyBatch) -> Any:
        """Return the output of the user's module."""
        torch.manual_seed(derive_seed(self.config.run.seed, step, int(batch.samples[0])))
        return module(x) if self.run is None else self.run(module, batch)

    def loss(self, output: Any, batch: Any) -> LossSum:
        """Return the user's loss of the module's output. Raises ModelError if it is not a scalar tensor."""
        value = self.loss_function(output, batch.targets)
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ModelError("loss: return a scalar tensor, the sum of the losses over the valid targets")
        if self.loss_check is not None:
            self.loss_check.check_targets(self.loss_function, output, batch.targets, value)
        return value, batch.num_tokens


@dataclass
class SampleTrainModule(CustomTrainModule):
    """A user's module, dataset and loss: `loss(model, batch)` runs the forward pass too."""

    def forward(self, module: nn.Module, x: Any, step: int, batch: AnyBatch) -> Any:
        """Return what the user's loss function returns."""
        torch.manual_seed(derive_seed(self.config.run.seed, step, int(batch.samples[0])))
        return self.loss_function(module, x)

    def loss(self, output: Any, batch: SampleBatch) -> LossSum:
        """Return the sum and the count, by default the number of samples. Raises ModelError for other values."""
        value, count = output if isinstance(output, tuple) and len(output) == 2 else (output, len(batch.samples))
        is_number = isinstance(count, int | float) or (isinstance(count, Tensor) and count.numel() == 1)
        if not isinstance(value, Tensor) or value.ndim != 0 or not is_number:
            raise ModelError(
                "loss: return a scalar tensor, the sum of the losses over the samples of the batch; or (sum, count)"
            )
        if self.loss_check is not None and not isinstance(output, tuple):
            self.loss_check.check_rows(value, len(batch.samples))
        return value, count
