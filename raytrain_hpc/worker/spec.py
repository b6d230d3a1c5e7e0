"""What the driver hands to every worker of a generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytrain_hpc.config import Config
from raytrain_hpc.plan.layout import Batching, Layout
from raytrain_hpc.shape import ModelShape

if TYPE_CHECKING:
    from raytrain_hpc.worker.task import LossFunction, ModelFactory


@dataclass(frozen=True)
class CustomModel:
    """A user's own module and loss, instead of the platform's decoder."""

    factory: ModelFactory
    loss: LossFunction


@dataclass(frozen=True)
class WorkerSpec:
    """One generation of a run. The same for every rank."""

    config: Config
    layout: Layout
    batching: Batching
    shape: ModelShape
    custom: CustomModel | None
    generation: int
    resume_step: int | None  # the published checkpoint to start from; None: start from the first weights
    steps_to: int  # train until this many steps are committed
    unevaluated: dict[str, Any] | None = None  # the metrics of `resume_step`, where its evaluation was cut short
