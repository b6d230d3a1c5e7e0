"""Copies of weights in bf16: the same bits as casts in every pass, under every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raytrain_hpc.errors import ConfigError
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.parallel.weight_copies import WeightCopies
from tests.model_specs import make_model_spec
from tests.parallel.layout_run import MODELS, run_layout
from tests.parallel.test_layouts import LAYOUTS
from tests.warm_pool import WarmPool, make_small_config

ONE = ["cluster.workers=1"]
CASES = {
    "one rank": ("llama", ONE),
    "tied head": ("gpt2", ONE),
    "loss in chunks": ("llama", [*ONE, "train.loss_chunks=3"]),
    "selective recomputation": ("llama", [*ONE, "parallel.activation_checkpointing=selective"]),
    "recomputation, residual stream in bf16": (
        "llama",
        [*ONE, "parallel.activation_checkpointing=full", "train.residual_dtype=bf16"],
    ),
    "compiled": ("llama", [*ONE, "train.compile=true"]),
    "compiled, one block of two recomputed": (
        "llama",
        [*ONE, "train.compile=true", "parallel.activation_checkpointing=full", "parallel.recompute_layers=1"],
    ),
    "float8 with the head": ("llama", [*ONE, "train.dtype=float8", "train.float8_head=true"]),
    "LoRA": ("llama", ["cluster.workers=2", "lora.rank=2"]),
    "Muon": ("llama", ["cluster.workers=2", "optimizer.name=muon"]),
    "frozen": ("llama", [*ONE, "optimizer.groups=[{pattern: '*.up.*', frozen: true}]"]),
    "averaged weights": ("llama", [*ONE, "train.callbacks=[{name: ema, args: {decay: 0.5}}]"]),
    "activation offload": ("llama", [*ONE, "parallel.activation_offload=cpu"]),
    "dp-3": ("llama", ["cluster.workers=3"]),
    "dp-3, elastic": ("llama", ["cluster.workers=3", "train.deterministic=elastic"]),
    "moe, elastic": ("moe", ["cluster.workers=2", "parallel.ep=2", "train.deterministic=elastic"]),
    "moe": ("moe", ONE),
} | {
    layout: (model, LAYOUTS[layout])
    for model, layout in (
        ("llama", "tp-3"),
        ("llama", "dp-2 x tp-2"),
        ("llama", "ring-2"),
        ("llama", "ulysses-2 x tp-2"),
        ("gpt2", "pp-4, gpipe"),
        ("llama", "pp-2 x tp-2, zbv"),
        ("moe", "ep-2 x tp-2"),
        ("moe", "ring-2, ep-2"),
    )
}


@pytest.mark.parametrize("case", CASES)
def test_copies_change_no_bit(pool: WarmPool, tmp_path: Path, case: str) -> None:
    model, words = CASES[case]
    runs = []
    for setting in ("false", "true"):
        overrides = (*MODELS[model], "train.dtype=bf16", *words, f"train.weight_copies={setting}")
        runs.append(run_layout(pool, tmp_path / setting, *overrides))
    (expected, state), (steps, copied_state) = runs
    for key in ("train/loss", "train/grad_norm"):
        assert [step[key] for step in steps] == [step[key] for step in expected]
    assert steps[-1]["val/loss"] == expected[-1]["val/loss"]
    assert copied_state.keys() == state.keys()
    for name, tensor in state.items():
        assert torch.equal(copied_state[name], tensor), name


def list_parameter_dtypes(trainer: Any) -> tuple[dict[str, torch.dtype], dict[str, torch.dtype]]:
    """Return the dtypes of the parameters of modules, and those of the weights that are trained."""
    model = trainer.model_step.model
    (module,) = model.modules.values()
    in_modules = {name: parameter.dtype for name, parameter in module.named_parameters()}
    return in_modules, {name: parameter.dtype for name, parameter in model.parameters.items()}


COPIED = ("qkv.weight", "out.weight", "gate.weight", "up.weight", "down.weight", "head.weight")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.dtype=bf16"], COPIED),
        (["train.dtype=bf16", "train.weight_copies=false"], ()),
        (["train.dtype=fp32"], ()),
        (["train.dtype=float8"], ("head.weight",)),
        (["train.dtype=float8", "train.weight_copies=true"], COPIED),
        (["train.dtype=bf16", "parallel.activation_checkpointing=full"], ()),
        (["train.dtype=bf16", "parallel.activation_checkpointing=full", "parallel.recompute_layers=1"], ()),
        (["train.dtype=bf16", "parallel.activation_checkpointing=full", "train.weight_copies=true"], COPIED),
        (["train.dtype=bf16", "model.num_experts=4"], ("experts.up", "experts.gate", "experts.down", *COPIED)),
        (["train.dtype=bf16", "cluster.workers=2", "parallel.zero=1", "train.weight_copies=true"], ()),
    ],
)
def test_which_weights_are_copied(pool: WarmPool, words: list[str], expected: tuple[str, ...]) -> None:
    config = make_small_config(None, *MODELS["llama"], "model.ffn_size=32", "model.num_layers=2", *words)
    in_modules, trained = pool.inspect_trainers(list_parameter_dtypes, config)[0]
    copied = {name for name, dtype in in_modules.items() if dtype == torch.bfloat16}
    assert copied == {name for name in in_modules if name.endswith(expected) and "router" not in name}
    assert set(trained.values()) == {torch.float32} and trained.keys() == in_modules.keys()


def test_gradients_of_several_passes_are_summed_in_fp32() -> None:
    torch.manual_seed(0)
    decoder = Decoder(make_model_spec("model.num_layers=1", seq_len=8))
    for parameter in decoder.parameters():
        nn.init.normal_(parameter)
    copies, weight = WeightCopies(), decoder.layers["0"].mlp.up.weight
    copies.replace_weights(decoder, include_float8=True)
    copies.refresh()
    copy = decoder.layers["0"].mlp.up.weight
    assert copies.get_weight(copy) is weight and copies.get_module_parameter(weight) is copy
    assert torch.equal(copy, weight.to(torch.bfloat16))
    parts = [torch.randn_like(copy) for _ in range(3)]
    for part in parts:
        (copy * part).sum().backward()
        assert copy.grad is None
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, parts[0].float() + parts[1].float() + parts[2].float())
    bf16_sum = parts[0] + parts[1] + parts[2]
    assert not torch.equal(weight.grad, bf16_sum.float()), "the case does not tell fp32 from bf16"


def test_copies_need_casts() -> None:
    with pytest.raises(ConfigError, match="train.weight_copies=True .*train.dtype=fp32 casts no weights"):
        make_small_config(None, "train.dtype=fp32", "train.weight_copies=true")
