"""Requests to a training loop: each is for one generation, whenever it arrives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raytrain_hpc.distributed.abort import CollectiveAbort
from raytrain_hpc.distributed.process_groups import GenerationAbortedError
from raytrain_hpc.runtime.control_channel import ControlChannel, RequestKind
from raytrain_hpc.training import builder
from tests.warm_pool import make_small_config, make_worker_spec

CPU = torch.device("cpu")


def list_requested(control: ControlChannel) -> list[str]:
    requested = {
        "stop": control.stop_requested,
        "pause": control.pause_requested,
        "distrust": control.distrust_requested,
    }
    return [kind for kind, is_requested in requested.items() if is_requested]


@pytest.mark.parametrize("kind", ["stop", "pause", "distrust"])
def test_a_request_that_overtakes_the_beginning_of_its_generation_is_kept(kind: RequestKind) -> None:
    control = ControlChannel()
    control.begin_generation(1)
    control.request(kind, 2)
    assert list_requested(control) == []
    control.begin_generation(2)
    assert list_requested(control) == [kind]
    control.begin_generation(3)
    assert list_requested(control) == []


def test_a_request_that_comes_after_its_generation_is_dropped() -> None:
    control = ControlChannel()
    control.begin_generation(2)
    control.request("pause", 1)
    control.request("stop", 4)
    assert list_requested(control) == []
    control.begin_generation(3)
    assert list_requested(control) == []
    control.begin_generation(4)
    assert list_requested(control) == ["stop"]


def test_a_request_without_a_generation_is_for_the_current_one() -> None:
    control = ControlChannel()
    control.request("stop")
    assert list_requested(control) == ["stop"]


def test_an_abort_that_is_replaced_after_it_was_called_aborts_at_once() -> None:
    """As when another rank fails while this one still builds its part of the generation."""
    control = ControlChannel()
    control.begin_generation(1)
    control.abort()
    control.arm_abort(CollectiveAbort({}))
    assert not control.is_aborted, "there were no collectives yet"
    control.abort()
    control.arm_abort(later := CollectiveAbort({}))
    assert later.is_aborted and control.is_aborted
    control.begin_generation(2)
    control.arm_abort(CollectiveAbort({}))
    assert not control.is_aborted


def test_collectives_can_be_aborted_while_the_state_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    control, seen = ControlChannel(), []
    build = builder.build_train_module

    def build_later(*arguments: Any) -> Any:
        control.abort()
        seen.append(control.is_aborted)
        return build(*arguments)

    monkeypatch.setattr(builder, "build_train_module", build_later)
    trainer = builder.build_trainer(make_worker_spec(make_small_config(), 1, steps_to=1), 0, CPU, None, control)
    assert seen == [True] and control.is_aborted
    with pytest.raises(GenerationAbortedError):
        trainer.run(0, 1)
