"""Which settings a run keeps: every key has a rule, and a changed value of a fixed key is found."""

from __future__ import annotations

from typing import Any

import pytest

from raytrain_hpc.config.fixed_settings import RULES, find_changed_setting, get_rule
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.schema import get_fields, to_dict


def make_stored(*words: str) -> dict[str, Any]:
    """Return the content of config.yaml of a run with these settings."""
    settings: dict[str, Any] = to_dict(load_config(None, list(words)))
    return settings


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    keys = get_fields()
    assert {get_rule(key) for key in keys} == {"fixed", "fixed by content", "changeable"}
    sections = {key.partition(".")[0] for key in keys}
    assert all(name in keys or (name.endswith(".*") and name[:-2] in sections) for name in RULES)


@pytest.mark.parametrize(
    ("word", "old"),
    [
        ("run.seed=1", 1337),
        ("optimizer.lr=1e-3", 3e-3),
        ("lr_scheduler.min_lr=1e-3", pytest.approx(3e-4)),
        ("lr_scheduler.name=constant", "cosine"),
        ("lr_scheduler.warmup_steps=3", 15),
        ("optimizer.name=sgd", "adamw"),
        ("optimizer.weight_decay=0", 0.1),
        ("train.global_batch_size=64", 32),
        ("train.seq_len=64", 128),
        ("train.dtype=bf16", "fp32"),
        ("lora.rank=4", 0),
        ("data.order=sequential", "shuffle"),
        ("parallel.quantize=weights", "none"),
    ],
)
def test_a_changed_fixed_setting_is_found(word: str, old: Any) -> None:
    words = [word, "parallel.zero=1"] if "quantize" in word else [word]
    found = find_changed_setting(make_stored("train.dtype=fp32"), load_config(None, words))
    assert found is not None and (found.key, found.old) == (word.partition("=")[0], old)


@pytest.mark.parametrize(
    "word",
    [
        "train.steps=900",
        "eval.interval=7",
        "train.deterministic=elastic",
        "parallel.zero=3",
        "parallel.activation_checkpointing=full",
        "cluster.workers=4",
        "checkpoint.interval=3",
        "fault.on_nan=skip",
        "logging.interval=1",
        "data.engine=local",
        "run.name=other",
        "lr_scheduler.min_lr=3e-4",  # the value that auto stands for
        "train.micro_batch_size=8",  # the stored auto is resolved in the checkpoint, which the driver compares
    ],
)
def test_other_settings_may_change(word: str) -> None:
    assert find_changed_setting(make_stored(), load_config(None, [word])) is None


def test_auto_keeps_what_the_run_has() -> None:
    stored = make_stored("train.micro_batch_size=4")
    assert find_changed_setting(stored, load_config(None, [])) is None
    assert find_changed_setting(stored, load_config(None, ["train.micro_batch_size=8"])) == (
        "train.micro_batch_size",
        4,
        8,
    )


def test_keys_that_an_older_version_lacks_are_skipped() -> None:
    stored = make_stored()
    del stored["optimizer"]["lr"], stored["data"]
    assert find_changed_setting(stored, load_config(None, ["optimizer.lr=1", "data.order=random"])) is None
