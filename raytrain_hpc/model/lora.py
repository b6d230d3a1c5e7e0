"""Low-rank adapters of linear layers (LoRA: Hu et al. 2021, arXiv 2106.09685).

A layer y = W x becomes y = W x + (alpha / rank) B A x, with W frozen. The names are those of `peft`, and initial
values have its distribution: "LAYER.lora_A.default.weight" and "LAYER.lora_B.default.weight"; W keeps its name.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

TARGET_MODULES = ("qkv", "out", "gate", "up", "down")
LORA_MARKER = ".lora_"  # in the names of trainable parameters
ADAPTER = "default"  # the name that peft gives to an adapter


@dataclass(frozen=True)
class LoraSpec:
    """LoRA settings. `target_modules`: linear layers of a block to adapt, from TARGET_MODULES."""

    rank: int
    alpha: float
    target_modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor of the adapters' output."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class AddAdapter:
    """Forward hook of a layer with adapters: adds their output. Has no reference to the layer, so it forms no cycle."""

    scale: float

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return W x + scale B A x of the layer's output W x."""
        down, up = layer.get_submodule(f"lora_A.{ADAPTER}"), layer.get_submodule(f"lora_B.{ADAPTER}")
        adapted: Tensor = output + up(down(inputs[0])) * self.scale
        return adapted


def add_lora_layers(layer: nn.Module, in_features: int, out_features: dict[str, int], rank: int) -> None:
    """Add uninitialized A and B to a layer. `out_features`: of B, by name; several share A."""
    layer.lora_A = nn.ModuleDict({ADAPTER: nn.Linear(in_features, rank, bias=False)})
    layer.lora_B = nn.ModuleDict({name: nn.Linear(rank, size, bias=False) for name, size in out_features.items()})
