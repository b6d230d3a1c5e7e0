"""Train a combination of features, and compare its losses with those of one process."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import ConfigError, LayoutError
from tests.combinations.draw import STEPS, Combination, make_config, make_reference_config
from tests.data.dataset_writer import write_dataset
from tests.parallel.compiled_run import trace_only
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics

if TYPE_CHECKING:
    from raytrain_hpc.distributed.rendezvous import Rendezvous
    from raytrain_hpc.runtime.worker_spec import WorkerSpec

BOUND = 2e-6  # of the relative difference of a loss, in fp32


@dataclass(frozen=True)
class Outcome:
    """How a combination compares with one process.

    `kind`: equal, different, refused or broken. `difference`: the largest relative one of a loss, nan if there is none.
    """

    kind: str
    difference: float = math.nan
    detail: str = ""


def write_documents(directory: Path) -> None:
    """Write a dataset of documents: several in most rows, and some that span rows."""
    generator = np.random.default_rng(5)
    splits = {
        name: [generator.integers(0, 64, size) for size in generator.integers(1, 30, number)]
        for name, number in (("train", 200), ("val", 30))
    }
    write_dataset(directory, splits, vocab_size=64, shard_tokens=100)


def check_combination(pool: WarmPool, combination: Combination, dataset: str) -> Outcome:
    """Train a combination: the first half of the steps in its first execution, the second half in the second.

    `dataset`: a directory that `write_documents` has filled.
    """
    directory = tempfile.mkdtemp(prefix="combination-")
    try:
        configs = [make_config(combination, execution, directory, dataset) for execution in combination.executions]
    except (ConfigError, LayoutError) as error:
        return Outcome("refused", detail=str(error))
    try:
        expected = _train(pool, make_reference_config(combination, dataset), None, STEPS)
        half = STEPS // 2
        losses = _train(pool, configs[0], None, half) + _train(pool, configs[1], half, STEPS)
    except (ConfigError, LayoutError) as error:
        return Outcome("refused", detail=str(error))
    except RankFailedError as error:
        return Outcome("broken", detail=str(error))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    difference = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    return Outcome("equal" if difference <= BOUND else "different", difference)


def _train(pool: WarmPool, config: Config, resume_step: int | None, steps_to: int) -> list[float]:
    """Return the losses of the steps after `resume_step`."""
    with mock.patch.object(pool, "_call_on_ranks", partial(_call_with_traced_compile, pool._call_on_ranks)):
        records = pool.train(config, resume_step=resume_step, steps_to=steps_to)[0]
    return [step["train/loss"] for step in get_step_metrics(records)]


def _call_with_traced_compile(call: Any, function: Any, world_size: int, *arguments: Any) -> Any:
    return call(partial(_run_with_traced_compile, function), world_size, *arguments)


def _run_with_traced_compile(
    function: Any, rank: int, rendezvous: Rendezvous, spec: WorkerSpec, device: str
) -> list[dict[str, Any]]:
    if spec.config.train.compile is not True:
        return function(rank, rendezvous, spec, device)
    import torch._dynamo

    torch._dynamo.reset()
    with trace_only():
        return function(rank, rendezvous, spec, device)
