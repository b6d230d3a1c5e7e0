"""LoRA: same losses as peft, same bits at every data-parallel degree, adapters merged on export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from raytrain_hpc import export_model, import_model
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.driver.run_setup import prepare_run
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.model.param_init import init_tensor
from raytrain_hpc.text_generation import load_model
from tests.huggingface.random_models import build_random_model, compute_hf_logits
from tests.parallel.layout_run import load_full_state
from tests.warm_pool import get_step_metrics

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

STEPS, LENGTH, BATCH, RANK, ALPHA = 8, 16, 4, 3, 6.0
HF_TARGET_NAMES = {"out": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}
OVERRIDES = [
    "data.path=synthetic",
    f"train.steps={STEPS}",
    f"train.seq_len={LENGTH}",
    f"train.global_batch_size={BATCH}",
    "train.micro_batch_size=1",
    "eval.samples=4",
    "logging.sample_tokens=0",
    "optimizer.lr=1e-2",
    "lr_scheduler.name=constant",
    "lr_scheduler.warmup_steps=0",
    f"lora.rank={RANK}",
    f"lora.alpha={ALPHA}",
    "logging.tensorboard=false",
]
TOKENS = torch.arange(24).view(2, 12) % 67


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lora")
    model = build_random_model("llama, tied")
    model.save_pretrained(directory / "theirs")
    import_model(directory / "theirs", directory / "ours")
    return directory


def train_run(workspace: Path, pool: Any, run: Path, *more: str) -> list[float]:
    words = [f"run.init_from={workspace / 'ours'}", f"run.dir={run}", *OVERRIDES, "cluster.workers=2", *more]
    return [step["train/loss"] for step in get_step_metrics(pool.train(load_config(None, words))[0])]


def train_with_peft(workspace: Path, config: Any) -> tuple[list[float], Any]:
    """Train peft's model on the same windows from the same adapters; return the losses and the merged model."""
    prepared = prepare_run(config, None, lambda line: None)
    base = transformers.AutoModelForCausalLM.from_pretrained(workspace / "theirs", dtype=torch.float32)
    targets = [name.rpartition(".")[2] for name in HF_TARGET_NAMES.values()]
    model = peft.get_peft_model(base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets))
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for layer in range(2):
            for name, hf_name in HF_TARGET_NAMES.items():
                module = "attention" if name == "out" else "mlp"
                lora_a = parameters[f"base_model.model.model.layers.{layer}.{hf_name}.lora_A.default.weight"]
                full_name = f"layers.{layer}.{module}.{name}.lora_A.default.weight"
                lora_a.copy_(init_tensor(prepared.model_spec, full_name, lora_a.shape, config.run.seed))
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    losses = []
    for step in range(STEPS):
        batches = [prepared.stream.read_microbatch(step, v) for v in range(BATCH)]
        inputs = torch.cat([torch.from_numpy(batch.inputs) for batch in batches])
        targets = torch.cat([torch.from_numpy(batch.targets) for batch in batches])
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.merge_and_unload()


def test_losses_and_the_merged_model_match_peft(workspace: Path, pool: Any, tmp_path: Path) -> None:
    targets = f"lora.target_modules=[{','.join(HF_TARGET_NAMES)}]"
    losses = train_run(workspace, pool, tmp_path / "run", targets)
    config = load_config(
        None, [f"run.init_from={workspace / 'ours'}", f"run.dir={tmp_path / 'other'}", *OVERRIDES, targets]
    )
    peft_losses, merged = train_with_peft(workspace, config)
    assert losses == pytest.approx(peft_losses, abs=1e-5)
    export_model(tmp_path / "run", tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(
        compute_hf_logits(exported, TOKENS), compute_hf_logits(merged.eval(), TOKENS), rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("layout", [[], ["parallel.zero=1"], ["parallel.zero=3"]], ids=["dp", "zero1", "zero3"])
def test_only_adapters_are_trained(workspace: Path, pool: Any, tmp_path: Path, layout: list[str]) -> None:
    train_run(workspace, pool, tmp_path / "run", *layout)
    before, after = load_full_state(workspace / "ours", 0), load_full_state(tmp_path / "run", STEPS)
    assert all(torch.equal(before[name], after[name]) for name in before)
    added = after.keys() - before.keys() - {"updates"}
    assert all(".lora_" in name for name in added) and all(after[name].any() for name in added if "model." in name)
    layers = 2 * 5  # each with A and B, and two moments of both
    assert len(added) == layers * 2 * 3
    # The exported model equals the one that `generate` samples from, with adapters on the fused qkv layer too.
    export_model(tmp_path / "run", tmp_path / "out")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    decoder, _ = load_model(RunDirectory(tmp_path / "run"))
    base, _ = load_model(RunDirectory(workspace / "ours"))
    with torch.no_grad():
        logits = decoder(TOKENS)
        torch.testing.assert_close(compute_hf_logits(exported, TOKENS), logits, rtol=0, atol=1e-5)
        assert (logits - base(TOKENS)).abs().max() > 0.1


def test_init_from_starts_with_merged_adapters(workspace: Path, pool: Any, tmp_path: Path) -> None:
    train_run(workspace, pool, tmp_path / "run")
    words = [
        f"run.init_from={tmp_path / 'run'}",
        f"run.dir={tmp_path / 'next'}",
        *OVERRIDES,
        "lora.rank=0",
        "cluster.workers=2",
    ]
    pool.train(load_config(None, [*words, "train.steps=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]))
    merged, after = load_model(RunDirectory(tmp_path / "run"))[0], load_full_state(tmp_path / "next", 1)
    assert all(torch.equal(after[f"model.{name}"], parameter) for name, parameter in merged.named_parameters())


def test_losses_are_bitwise_equal_at_every_degree_and_after_resuming(
    workspace: Path, pool: Any, tmp_path: Path
) -> None:
    elastic = "train.deterministic=elastic"
    reference = train_run(workspace, pool, tmp_path / "one", elastic, "cluster.workers=1")
    assert train_run(workspace, pool, tmp_path / "two", elastic) == reference
    assert train_run(workspace, pool, tmp_path / "zero", elastic, "parallel.zero=3") == reference
    words = [
        f"run.init_from={workspace / 'ours'}",
        f"run.dir={tmp_path / 'interrupted'}",
        *OVERRIDES,
        elastic,
        "cluster.workers=2",
    ]
    config = load_config(None, words)
    pool.train(config, steps_to=3)
    resumed = get_step_metrics(pool.train(config, resume_step=3)[0])
    assert [step["train/loss"] for step in resumed] == reference[3:]


@pytest.mark.parametrize(
    "word, reason",
    [
        ("lora.target_modules=[q_proj]", "choose from qkv, out, gate, up, down"),
        ("lora.target_modules=[]", "choose from"),
    ],
)
def test_unsupported_lora_settings_are_refused(word: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, [*OVERRIDES, word])
