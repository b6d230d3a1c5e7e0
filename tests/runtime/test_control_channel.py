"""Requests to a training loop: each is for one generation, whenever it arrives."""

from __future__ import annotations

import pytest

from raytrain_hpc.runtime.control_channel import ControlChannel, RequestKind


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
