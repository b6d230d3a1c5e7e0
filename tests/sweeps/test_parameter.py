"""`--over`: values, ranges with their scale and step, and what is refused."""

from __future__ import annotations

import pytest

from raytrain_hpc.errors import ConfigError
from raytrain_hpc.sweeps.parameter import Choices, Range, parse_parameter, parse_parameters


@pytest.mark.parametrize(
    "text, expected",
    [
        ("optimizer.lr=1e-3,3e-3", Choices("optimizer.lr", ("1e-3", "3e-3"))),
        ("optimizer.lr=1e-3", Choices("optimizer.lr", ("1e-3",))),
        ("data.path=../a,../b", Choices("data.path", ("../a", "../b"))),
        (
            "fault.inject=[],[{kind: kill, rank: 0, step: 1}]",
            Choices("fault.inject", ("[]", "[{kind: kill, rank: 0, step: 1}]")),
        ),
        ("optimizer.lr=1e-4..1e-2", Range("optimizer.lr", 1e-4, 1e-2, is_log=True)),
        ("optimizer.lr=1e-4..1e-2:linear", Range("optimizer.lr", 1e-4, 1e-2)),
        ("optimizer.lr=1e-3..2e-3", Range("optimizer.lr", 1e-3, 2e-3)),
        ("optimizer.lr=1e-3..2e-3:log", Range("optimizer.lr", 1e-3, 2e-3, is_log=True)),
        ("optimizer.weight_decay=0..1", Range("optimizer.weight_decay", 0.0, 1.0)),
        ("optimizer.beta1=.5..0.95:step=0.1", Range("optimizer.beta1", 0.5, 0.9, step=0.1)),
        ("model.num_layers=2..8", Range("model.num_layers", 2, 8, is_integer=True)),
        ("train.global_batch_size=8..70:step=8", Range("train.global_batch_size", 8, 64, is_integer=True, step=8)),
        ("train.steps=1e2..1e4", Range("train.steps", 100, 10000, is_integer=True, is_log=True)),
        ("train.micro_batch_size=1..4", Range("train.micro_batch_size", 1, 4, is_integer=True)),
    ],
)
def test_a_parameter_is_parsed(text: str, expected: object) -> None:
    assert parse_parameter(text) == expected


@pytest.mark.parametrize(
    "over, reason",
    [
        ([], "name a key to vary"),
        (["optimizer.lr"], "must have the form key=value,value,... or key=low..high"),
        (["optimizer.lr=1e-3,,1e-2"], "must have the form"),
        (["optimizer.lr="], "must have the form"),
        (["train.rate=1..2"], "did you mean"),
        (["optimizer.lr=1e-2..1e-4"], "the number after .. must be the larger one"),
        (["optimizer.lr=0..1e-4:log"], ":log needs numbers above 0"),
        (["optimizer.lr=1e-4..1e-2:log:step=1e-4"], "leave out :log or :step"),
        (["optimizer.lr=1e-4..1e-2:step=1"], "above 0 and at most 0.0099"),
        (["optimizer.lr=1e-4..1e-2:lgo"], ":lgo is no option of a range; write :log, :linear or :step=NUMBER"),
        (["model.num_layers=1.5..4"], "model.num_layers needs whole numbers"),
        (["model.num_layers=1..4:step=0.5"], "model.num_layers needs whole numbers"),
        (["run.name=1..4"], "run.name takes no numbers; list its values"),
        (["optimizer.lr=1e-3", "optimizer.lr=1e-2"], "optimizer.lr is given twice"),
    ],
)
def test_what_is_malformed_is_refused(over: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace(".", r"\.")):
        parse_parameters(over)
