"""Optimizers by class path under every layout, against the class itself on whole parameters in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_hpc import train
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.optim.optimizer_class import OptimizerClass, check_optimizer_class
from tests.optim import own_optimizers
from tests.optim.dense_training import (
    BASE,
    LAYOUTS,
    Parameters,
    Update,
    measure_difference,
    select_weights,
    train_dense,
    train_layout,
)
from tests.parallel.layout_run import LLAMA, ODD
from tests.training import elastic_runs
from tests.training.elastic_runs import RunOnce, run_bits, run_through_layouts
from tests.training.generations import train_with_changed_ranks
from tests.training.test_step_guard import read_shards
from tests.warm_pool import RankFailedError, WarmPool, get_step_metrics, make_small_config

MODEL = [*LLAMA, *ODD, "model.num_kv_heads=2", "model.tie_embeddings=false"]
LR = 3e-3
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "torch.optim.SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "torch.optim.Adam": (torch.optim.Adam, {"betas": [0.8, 0.9], "amsgrad": True}),
    "torch.optim.AdamW": (torch.optim.AdamW, {"weight_decay": 0.2}),
    "torch.optim.RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "torch.optim.Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    "torch.optim.NAdam": (torch.optim.NAdam, {}),
    "torch.optim.RAdam": (torch.optim.RAdam, {"betas": [0.5, 0.6]}),
    "torch.optim.Adadelta": (torch.optim.Adadelta, {}),
    "torch.optim.Adamax": (torch.optim.Adamax, {}),
    "torch.optim.ASGD": (torch.optim.ASGD, {"t0": 1.0}),
    "torch.optim.Rprop": (torch.optim.Rprop, {}),
    "tests.optim.own_optimizers.DecayingSign": (own_optimizers.DecayingSign, {"decay": 0.7}),
}


def make_words(name: str, arguments: dict[str, Any]) -> list[str]:
    return [f"optimizer.name={name}", f"optimizer.args={{{', '.join(f'{k}: {v}' for k, v in arguments.items())}}}"]


def make_plain(name: str, parameters: Parameters) -> Update:
    """Return the step of the class itself, with weight decay for parameters of two or more dimensions only."""
    optimizer_class, arguments = OPTIMIZERS[name]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters.values() if p.ndim >= 2]},
        {"params": [p for p in parameters.values() if p.ndim < 2]},
    ]
    optimizer = optimizer_class(groups, lr=LR, **arguments)  # type: ignore[call-arg]
    if "weight_decay" in optimizer.defaults:
        optimizer.param_groups[1]["weight_decay"] = 0.0

    def update(parameters: Parameters) -> None:
        optimizer.step()

    return update


# ZeRO slices the slices of tensor parallelism here. NAdam has moments and scalars per parameter.
CASES = [
    *((name, "tp-2 zero3-2") for name in OPTIMIZERS),
    *(("torch.optim.NAdam", layout) for layout in LAYOUTS if "ep" not in layout and layout != "tp-2 zero3-2"),
]


@pytest.fixture(scope="module")
def references() -> Callable[[str], dict[str, torch.Tensor]]:
    config = make_small_config(None, *BASE, *MODEL)
    return cache(lambda name: train_dense(config, partial(make_plain, name)))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_every_layout_agrees_with_the_class_on_whole_parameters(
    pool: WarmPool, references: Any, tmp_path: Path, name: str, layout: str
) -> None:
    words = make_words(name, OPTIMIZERS[name][1])
    state = train_layout(pool, tmp_path, *words, *MODEL, *LAYOUTS[layout])
    assert measure_difference(select_weights(state), references(name)) < 1e-11
    counts = [float(tensor) for key, tensor in state.items() if key.startswith("optimizer.num_updates.")]
    assert counts == [3.0] * len(references(name))


# One of each kind of state: one moment, a running maximum, scalars per parameter, an average, a sum, that of a user.
ELASTIC_OPTIMIZERS = [
    *(f"torch.optim.{name}" for name in ("SGD", "Adam", "NAdam", "ASGD", "Adagrad")),
    "tests.optim.own_optimizers.DecayingSign",
]


@pytest.mark.parametrize("name", ELASTIC_OPTIMIZERS)
def test_elastic_runs_have_the_bits_of_one_process(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, name: str
) -> None:
    """On slices; the next test has whole parameters too."""
    words = [*elastic_runs.MODELS["gpt2"], *make_words(name, OPTIMIZERS[name][1])]
    assert run_bits(pool, tmp_path, *words, *elastic_runs.LAYOUTS["zero3-4"]) == run_once(*words)


@pytest.mark.parametrize("name", ["torch.optim.ASGD", "torch.optim.Adagrad"])
def test_a_run_that_changes_its_layout_keeps_the_bits(
    pool: WarmPool, run_once: RunOnce, tmp_path: Path, name: str
) -> None:
    words = [*elastic_runs.MODELS["gpt2"], *make_words(name, OPTIMIZERS[name][1])]
    losses, digest = run_through_layouts(pool, tmp_path, *words)
    expected, expected_digest = run_once(*words)
    assert losses == [step[0] for step in expected] and digest == expected_digest


def test_adamw_by_path_has_the_bits_of_adamw(run_once: RunOnce) -> None:
    by_path = make_words("torch.optim.AdamW", {"betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True})
    words = [*elastic_runs.MODELS["gpt2"], "train.deterministic=true"]  # elastic gives the ends of slices other bits
    assert run_once(*words, *by_path)[0] == run_once(*words)[0]


def test_the_bias_correction_of_adamw_counts_no_skipped_step(pool: WarmPool, tmp_path: Path) -> None:
    """Torch's class counts updates by itself. Nor is it counted after a resume, and after a recovery from memory."""
    faults = ", ".join(["{kind: nan, rank: 0, step: 2}"] * 2)
    skipping = ["fault.on_nan=skip", f"fault.inject=[{faults}]"]
    words = ["train.steps=6", "train.deterministic=true", "checkpoint.interval=4", *skipping]
    by_path = make_words("torch.optim.AdamW", {"betas": [0.9, 0.999], "weight_decay": 0.1, "fused": True})
    config = make_small_config(tmp_path / "own", *words, "optimizer.beta2=0.999")
    by_class = make_small_config(tmp_path / "class", *words, *by_path)
    losses, of_class = ([m["train/loss"] for m in get_step_metrics(pool.train(c)[0])] for c in (config, by_class))
    assert len(losses) == 6 and losses[2:] == of_class[2:]
    assert [m["train/loss"] for m in get_step_metrics(pool.train(config, resume_step=4)[0])] == losses[4:]
    recovered, undisturbed = train_with_changed_ranks(pool, tmp_path / "memory", *skipping)
    assert len(recovered) == 6 and recovered[2:] == undisturbed[2:]


def test_state_is_recovered_from_the_memory_of_other_ranks(pool: WarmPool, tmp_path: Path) -> None:
    losses, undisturbed = train_with_changed_ranks(pool, tmp_path, *make_words("torch.optim.NAdam", {}))
    assert losses == undisturbed


def test_numbers_that_yaml_reads_as_text_are_numbers() -> None:
    config = make_small_config(
        None, "optimizer.name=torch.optim.Adam", "optimizer.args={eps: 1e-6, betas: [8e-1, 0.9]}"
    )
    defaults = OptimizerClass(config).create([nn.Parameter(torch.zeros(1))], None).defaults
    assert (defaults["eps"], list(defaults["betas"])) == (1e-6, [0.8, 0.9])


def test_a_run_resumes_with_the_same_optimizer(tmp_path: Path) -> None:
    words = ["cluster.workers=0", *make_words("torch.optim.SGD", {"momentum": 0.5})]
    words.append("optimizer.groups=[{pattern: '*norm*', weight_decay: 0}]")
    train(make_small_config(tmp_path, *words, "train.steps=2"), quiet=True)
    assert train(make_small_config(tmp_path, *words, "train.steps=4"), quiet=True).steps == 4


def test_a_skipped_step_leaves_the_state_unchanged(pool: WarmPool, tmp_path: Path) -> None:
    faults = ", ".join(["{kind: nan, rank: 1, step: 4}"] * 2)
    words = ["cluster.workers=2", "fault.on_nan=skip", "checkpoint.interval=1", "checkpoint.keep=0"]
    words += [*make_words("torch.optim.NAdam", {}), f"fault.inject=[{faults}]"]
    pool.train(make_small_config(tmp_path, *words))
    before, after = (read_shards(tmp_path / "checkpoints" / f"step-0000000{step}") for step in (3, 4))
    assert before == after


@pytest.mark.parametrize("name", ["torch.optim.NAdam", "tests.optim.own_optimizers.DecayingSign"])
def test_offloaded_state_gives_the_same_bits(pool: WarmPool, tmp_path: Path, name: str) -> None:
    words, results = [*make_words(name, {}), "cluster.workers=2", "parallel.zero=1"], []
    for number, offload in enumerate(([], ["parallel.offload=disk", f"parallel.offload_dir={tmp_path / 'scratch'}"])):
        records = pool.train(make_small_config(tmp_path / str(number), *words, *offload))
        results.append([record["shard"] for rank in records for record in rank if record["type"] == "shard"])
    assert results[0] and results[0] == results[1]


def test_adafactor_trains_whole_parameters_and_is_refused_for_slices(pool: WarmPool, tmp_path: Path) -> None:
    words = ["optimizer.name=torch.optim.Adafactor", *MODEL]
    state = train_layout(pool, tmp_path / "a", *words, "cluster.workers=2", "parallel.pp=2")
    assert measure_difference(state, train_layout(pool, tmp_path / "b", *words)) < 1e-11
    assert state["optimizer.row_var.layers.0.mlp.up.weight"].shape == (50, 1)
    for setting in ("parallel.zero=1", "parallel.tp=2", "parallel.offload=cpu"):
        config = make_small_config(None, *words, setting)
        with pytest.raises(ConfigError, match=rf"Adafactor.*updates an element by other elements.*{setting} slices"):
            check_optimizer_class(config)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.name=torch.optim.Adamm"], "cannot be imported: AttributeError: .*Adamm"),
        (["optimizer.name=nowhere.Adam"], "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        (["optimizer.name=torch.nn.Linear"], "not a subclass of torch.optim.Optimizer"),
        (["optimizer.name=tests.optim.own_optimizers.NOT_AN_OPTIMIZER"], "not a subclass of torch.optim.Optimizer"),
        (["optimizer.name=torch.optim.LBFGS"], "evaluates the loss several times per step through a closure"),
        (["optimizer.name=torch.optim.SparseAdam"], "a step on small parameters fails: RuntimeError: SparseAdam"),
        (["optimizer.name=torch.optim.Muon"], "orthogonalizes whole matrices.*use optimizer.name=muon"),
        (["optimizer.name=torch.optim.Adam", "optimizer.args={momentum: 0.9}"], "with args=.*unexpected keyword"),
        (["optimizer.name=torch.optim.Adam", "optimizer.args={betas: [2, 0.9]}"], "Invalid beta parameter"),
        (["optimizer.name=tests.optim.own_optimizers.WithoutLr"], "has no argument lr"),
        (["optimizer.name=tests.optim.own_optimizers.CountingInAttribute"], "keeps state in its attributes"),
        (["optimizer.name=tests.optim.own_optimizers.Normalized", "parallel.zero=3"], "zero=3 slices parameters"),
        (
            ["optimizer.name=torch.optim.Rprop", "optimizer.groups=[{pattern: '*', weight_decay: 0.1}]"],
            "optimizer.groups.weight_decay=0.1 .*Rprop has no argument weight_decay",
        ),
        (
            ["optimizer.name=torch.optim.Adam", "optimizer.args={fused: true}", "train.deterministic=elastic"],
            r"optimizer.args={'fused': True} .*not bit-exact",
        ),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        train(make_small_config(tmp_path / "run", *words, "cluster.workers=0"), quiet=True)
    assert len(str(refused.value).splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.name=adam"], "needs adamw, sgd, muon or the path of a class"),
        (["optimizer.args={momentum: 0.9}"], "optimizer.name=adamw has keys of its own"),
        (["optimizer.name=torch.optim.Adam", "optimizer.beta1=0.8"], "optimizer.beta1=0.8 .*put it in optimizer.args"),
        (["optimizer.name=torch.optim.Adam", "optimizer.args={lr: 1}"], "give lr as optimizer.lr"),
    ],
)
def test_settings_that_do_not_fit_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_small_config(None, *words)


def test_state_that_cannot_be_stored_is_refused(pool: WarmPool) -> None:
    with pytest.raises(RankFailedError, match="keeps note of type str, which cannot be stored"):
        pool.train(make_small_config(None, "optimizer.name=tests.optim.own_optimizers.WithText"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "optimizer.name='adamw'.*trained with 'torch.optim.SGD'"),
        (["optimizer.name=torch.optim.SGD"], "optimizer.args={}.*trained with {'momentum': 0.5}"),
        (["optimizer.name=torch.optim.SGD", "optimizer.args={momentum: 0.6}"], "trained with {'momentum': 0.5}"),
    ],
)
def test_a_run_does_not_resume_with_another_optimizer(tmp_path: Path, words: list[str], message: str) -> None:
    settings = ["cluster.workers=0", "train.steps=2"]
    first = ["optimizer.name=torch.optim.SGD", "optimizer.args={momentum: 0.5}"]
    train(make_small_config(tmp_path, *settings, *first), quiet=True)
    for has_config in (True, False):  # the checkpoint knows it too
        with pytest.raises(ConfigError, match=message if has_config else "trained with"):
            train(make_small_config(tmp_path, *settings, "train.steps=3", *words), quiet=True)
        (tmp_path / "config.yaml").unlink(missing_ok=True)
