"""Moments in bf16: AdamW and Muon as with fp32 moments that are rounded after each step, on every layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from raytrain_hpc.config.schema import OptimizerConfig
from raytrain_hpc.config.training_config import MAX_BF16_DECAY
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.optim.bf16_moments import Bf16Moments
from raytrain_hpc.optim.mmap_buffer import PAGE
from raytrain_hpc.optim.offload import CpuOffload, DiskOffload, MomentStorage, OnDevice
from raytrain_hpc.optim.optimizer import MOMENT_NAMES, Optimizer, get_local_slices
from tests.parallel.layout_run import MODELS, load_full_state
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

BF16 = "optimizer.moment_dtype=bf16"
KINDS = MOMENT_NAMES["adamw"]
ELASTIC = [*MODELS["llama"], BF16, "train.deterministic=elastic", "train.micro_batch_size=2"]


def make_parameters(generator: torch.Generator) -> dict[str, nn.Parameter]:
    """Return parameters larger than a part, small, empty and transposed."""
    shapes = {"a": (333, 77), "b": (5,), "c": (3 * PAGE + 17,), "d": (0, 4), "f": (7,)}
    parameters = {name: nn.Parameter(torch.randn(*shape, generator=generator)) for name, shape in shapes.items()}
    parameters["t"] = nn.Parameter(torch.randn(90, 70, generator=generator).t())
    return parameters


def make_storage(kind: str, parameters: dict[str, nn.Parameter], directory: Path) -> MomentStorage:
    slices = get_local_slices(parameters)
    if kind == "disk":
        return DiskOffload(slices, KINDS, str(directory), 2**15, torch.bfloat16)
    if kind == "cpu":
        return CpuOffload(slices, KINDS, 2**15, torch.bfloat16)
    return OnDevice(slices, KINDS, torch.bfloat16)


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize(("kind", "wide_bytes"), [("device", 1), ("device", 2**17), ("device", 2**30), ("cpu", 2**16)])
def test_steps_are_those_of_torch_with_rounded_state(tmp_path: Path, kind: str, wide_bytes: int, elastic: bool) -> None:
    generator, config = torch.Generator().manual_seed(1), OptimizerConfig()
    parameters = make_parameters(generator)
    storage = Bf16Moments(make_storage(kind, parameters, tmp_path), wide_bytes)
    optimizer = Optimizer(parameters, config, storage, elastic=elastic)
    copies = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in parameters.items()}
    decayed = [copies[name] for name, parameter in parameters.items() if parameter.ndim >= 2]
    others = [copies[name] for name, parameter in parameters.items() if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    options = {"lr": 1e-2, "betas": (config.beta1, config.beta2), "eps": config.eps}
    reference = torch.optim.AdamW(groups, **options, fused=True)
    for _ in range(4):
        for name, parameter in parameters.items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            # The kernel expects gradients in the memory order of the weights.
            copies[name].grad = torch.empty_like(copies[name]).copy_(parameter.grad)
        optimizer.step(1e-2)
        reference.step()
        for state in reference.state.values():
            for moment in KINDS:
                state[moment].copy_(state[moment].to(torch.bfloat16))
    for name, copy in copies.items():
        # One unit in the last place: elements at the end of a part are computed by other instructions.
        assert torch.allclose(parameters[name], copy, rtol=3e-7, atol=1e-9), name
        for moment in KINDS:
            stored = optimizer.moments[moment][name]
            assert stored.dtype == torch.bfloat16
            if copy.numel():
                assert torch.equal(stored, reference.state[copy][moment].to(torch.bfloat16)), (name, moment)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_storages_give_the_same_bits(tmp_path: Path, kind: str) -> None:
    results: list[list[Tensor]] = []
    for of_run in ("device", kind):
        generator = torch.Generator().manual_seed(2)
        parameters = make_parameters(generator)
        storage = Bf16Moments(make_storage(of_run, parameters, tmp_path), 2**16)
        optimizer = Optimizer(parameters, OptimizerConfig(), storage, elastic=False)
        for _ in range(3):
            for parameter in parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(1e-2)
        moments = [optimizer.moments[moment][name] for moment in KINDS for name in parameters]
        results.append([*(p.detach() for p in parameters.values()), *moments])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


LAYOUTS = {
    "dp-3": ["cluster.workers=3"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "zero1-3": ["cluster.workers=3", "parallel.zero=1"],
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_bits_of_one_process(pool: WarmPool, tmp_path: Path, layout: str, optimizer: str) -> None:
    words = [*ELASTIC, f"optimizer.name={optimizer}"]
    states = []
    for name, of_layout in (("one", ["cluster.workers=1"]), ("many", LAYOUTS[layout])):
        config = make_small_config(tmp_path / name, *words, *of_layout)
        pool.train(config)
        states.append(load_full_state(tmp_path / name, config.train.steps))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert torch.equal(states[1][name], tensor), name
    dtypes = {name.split(".")[1]: tensor.dtype for name, tensor in states[0].items() if name.startswith("optimizer.")}
    assert dtypes.pop("momentum_buffer", torch.bfloat16) == torch.bfloat16
    assert dtypes == dict.fromkeys(KINDS, torch.bfloat16)


def test_a_checkpoint_resumes_on_another_layout_and_storage(pool: WarmPool, tmp_path: Path) -> None:
    words = ELASTIC
    run = partial(make_small_config, tmp_path / "run", *words)
    whole = get_step_metrics(pool.train(make_small_config(tmp_path / "whole", *words))[0])
    disk = ["parallel.offload=disk", f"parallel.offload_dir={tmp_path / 'scratch'}"]
    (tmp_path / "scratch").mkdir()
    parts = get_step_metrics(pool.train(run("cluster.workers=2", "parallel.zero=3"), steps_to=3)[0])
    parts += get_step_metrics(pool.train(run("cluster.workers=1", *disk), resume_step=3)[0])
    assert [step["train/loss"] for step in parts] == [step["train/loss"] for step in whole]
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step-00000003" / "manifest.json").read_text())
    moments = {name: entry for name, entry in manifest["index"].items() if name.startswith("optimizer.")}
    assert {entry["dtype"] for entry in moments.values()} == {"bfloat16"}


def test_the_loss_curve_stays_near_that_of_fp32_moments(pool: WarmPool) -> None:
    words = ["train.steps=40", "optimizer.lr=3e-3"]
    curves = [
        [step["train/loss"] for step in get_step_metrics(pool.train(make_small_config(None, *words, *moments))[0])]
        for moments in ([], [BF16])
    ]
    assert curves[0] != curves[1]
    assert curves[1] == pytest.approx(curves[0], rel=2e-2)


def test_the_largest_decay_rate_still_lets_every_moment_decay() -> None:
    """Decrease every bf16 number of a binade by one step: none keeps its value; with a larger rate some do."""
    numbers = torch.arange(2**7, 2**8, dtype=torch.float32).to(torch.bfloat16)

    def decay(rate: float) -> Tensor:
        return (numbers.float() * rate).to(torch.bfloat16)

    assert (decay(MAX_BF16_DECAY - 1e-6) < numbers).all()
    assert not (decay(0.999) < numbers).any()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimizer.beta2=0.999"], r"optimizer.beta2=0.999 .*moment_dtype=bf16 has 8 significant bits"),
        (["optimizer.name=muon", "optimizer.muon_momentum=0.999"], r"optimizer.muon_momentum=0.999 .*8 significant"),
        (["optimizer.name=sgd"], r"optimizer.moment_dtype='bf16' .*optimizer.name=sgd: this is for adamw and muon"),
        (["optimizer.name=torch.optim.Adam"], r"optimizer.moment_dtype='bf16' .*this is for adamw and muon"),
    ],
)
def test_refusals(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_small_config(None, BF16, *words)
