"""Unchanged transformers models under every layout: the losses of a plain transformers loop, and export back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from raytrain_hpc import Config, ConfigError, LayoutError, ModelError, export_model, train
from raytrain_hpc.api import _build_custom_model
from raytrain_hpc.data.loader.stream import StreamSpec
from raytrain_hpc.model.transformers_model import check_document_isolation, run_causal_lm
from raytrain_hpc.runtime.worker_spec import CustomModel
from raytrain_hpc.training.train_module import Batch
from tests.callbacks.test_built_in_callbacks import read_tensors
from tests.parallel.compiled_run import run_compiled
from tests.warm_pool import WarmPool, get_step_metrics, make_small_config

STEPS = 10
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "qwen3_moe": Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
}
LAYOUTS = {
    "dp2": ["cluster.workers=2"],
    "zero3-2": ["cluster.workers=2", "parallel.zero=3"],
    "tp2": ["cluster.workers=2", "parallel.tp=2"],
    "tp2 x zero3-2": ["cluster.workers=4", "parallel.tp=2", "parallel.zero=3"],
}
BASE = [f"train.steps={STEPS}", "train.micro_batch_size=2", "train.dtype=fp32", "train.global_batch_size=8"]
BASE += ["lr_scheduler.name=constant", "lr_scheduler.warmup_steps=0", "optimizer.lr=0.003"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models: the configuration, and random weights."""
    root = tmp_path_factory.mktemp("models")
    for number, (name, hf_config) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        AutoModelForCausalLM.from_config(hf_config).save_pretrained(root / name)
    return {name: root / name for name in FAMILIES}


def make_config(model: Path, run_dir: Path | None, *words: str) -> Config:
    return make_small_config(run_dir, *BASE, f"model.hf={model}", *words)


def make_custom(config: Config) -> CustomModel:
    custom = _build_custom_model(config, None, None, None, None, None, None, None)
    assert custom is not None
    return custom


def run_plain_loop(model_dir: Path, config: Config) -> list[float]:
    """Train with transformers and torch alone, on the same samples; one process, AdamW as configured."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).train()
    train_config, settings = config.train, config.optimizer
    spec = StreamSpec(config.data, 64, config.run.seed, train_config.seq_len, train_config.global_batch_size, 8)
    stream, losses = spec.open_stream(spec.open_dataset()), []
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.eps)
    for step in range(STEPS):
        microbatch = stream.read_microbatch(step, 0)
        inputs, targets = torch.from_numpy(microbatch.inputs), torch.from_numpy(microbatch.targets)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), train_config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.fixture(scope="module")
def plain_losses(directories: dict[str, Path]) -> Callable[[str], list[float]]:
    return cache(lambda name: run_plain_loop(directories[name], make_config(directories[name], None)))


def run(pool: WarmPool, config: Config, **options: Any) -> list[float]:
    records = pool.train(config, custom=make_custom(config), **options)
    return [step["train/loss"] for step in get_step_metrics(records[0])]


# Every layout with one family, and every family with the layout that has all cuts.
CASES = [("llama", layout) for layout in LAYOUTS]
CASES += [(family, "tp2 x zero3-2") for family in FAMILIES if family != "llama"]


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_every_layout_has_the_losses_of_a_plain_transformers_loop(
    pool: WarmPool, directories: dict[str, Path], plain_losses: Any, tmp_path: Path, family: str, layout: str
) -> None:
    """And the exported weights give equal logits in transformers, whatever the layout was."""
    config = make_config(directories[family], tmp_path / "run", *LAYOUTS[layout])
    losses = run(pool, config)
    assert losses == pytest.approx(plain_losses(family), rel=1e-6) and losses[-1] != losses[0]
    result = export_model(tmp_path / "run", tmp_path / "out")
    assert result.family == FAMILIES[family].model_type and result.step == STEPS
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    initial = AutoModelForCausalLM.from_pretrained(directories[family])
    tokens = torch.arange(24).view(2, 12)
    logits = exported(tokens).logits
    assert not torch.allclose(logits, initial(tokens).logits, atol=1e-3)
    trained = AutoModelForCausalLM.from_config(FAMILIES[family])
    missing = trained.load_state_dict(read_tensors(tmp_path / "run", STEPS, "model."), strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}  # tied to the embedding
    trained.tie_weights()
    assert torch.equal(trained.eval()(tokens).logits, exported.eval()(tokens).logits)
    assert AutoConfig.from_pretrained(tmp_path / "out").to_dict().keys() == initial.config.to_dict().keys()


def test_a_checkpoint_moves_between_layouts(
    pool: WarmPool, directories: dict[str, Path], plain_losses: Any, tmp_path: Path
) -> None:
    words = ["checkpoint.interval=0"]
    first = run(
        pool, make_config(directories["qwen3_moe"], tmp_path, *words, *LAYOUTS["tp2 x zero3-2"]), steps_to=STEPS // 2
    )
    second = run(
        pool, make_config(directories["qwen3_moe"], tmp_path, *words, "cluster.workers=3"), resume_step=STEPS // 2
    )
    assert first + second == pytest.approx(plain_losses("qwen3_moe"), rel=1e-6)


def test_recomputed_blocks_keep_the_losses(pool: WarmPool, directories: dict[str, Path], plain_losses: Any) -> None:
    words = ["parallel.activation_checkpointing=full", *LAYOUTS["zero3-2"]]
    assert run(pool, make_config(directories["llama"], None, *words)) == pytest.approx(plain_losses("llama"), rel=1e-6)


@pytest.mark.parametrize("layout", [["cluster.workers=1"], LAYOUTS["tp2"]])
def test_compiled_blocks_keep_the_losses(
    pool: WarmPool, directories: dict[str, Path], plain_losses: Any, layout: list[str]
) -> None:
    config = make_config(directories["llama"], None, "train.compile=true", *layout)
    for rank in run_compiled(pool, config, steps=STEPS, custom=make_custom(config)):
        assert rank.losses == pytest.approx(plain_losses("llama"), rel=1e-6)
        assert rank.num_graphs[0] > 0 and rank.split_reasons == []


def test_without_weights_the_seed_gives_them(pool: WarmPool, directories: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((directories["llama"] / "config.json").read_text())
    runs = [
        run(pool, make_config(tmp_path, None, "train.steps=2", *words))
        for words in ([], LAYOUTS["tp2"], ["run.seed=2"])
    ]
    assert runs[0] == pytest.approx(runs[1], rel=1e-6) and runs[0][0] != pytest.approx(runs[2][0], rel=1e-6)


def test_mistakes_are_named(directories: dict[str, Path], tmp_path: Path) -> None:
    def get_error(kind: type[Exception], *words: str, **options: Any) -> str:
        with pytest.raises(kind) as caught:
            train(make_small_config(tmp_path / "run", "cluster.workers=2", *words), quiet=True, **options)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    hf = f"model.hf={directories['llama']}"
    assert "no config.json there" in get_error(ConfigError, f"model.hf={tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    assert get_error(ConfigError, f"model.hf={tmp_path}").startswith(f"model.hf='{tmp_path}' (load_config): ")
    assert "only the built-in decoder can be split into stages" in get_error(LayoutError, hf, "parallel.pp=2")
    assert "attention can be split over the positions" in get_error(LayoutError, hf, "parallel.cp=2")
    assert "its vocabulary has 64 tokens, that of the dataset 99" in get_error(ConfigError, hf, "model.vocab_size=99")
    assert "known styles" in get_error(ModelError, hf, plan={"lm_head": "columns"})


def test_documents_of_a_row_are_kept_apart_or_refused(tmp_path: Path) -> None:
    """Llama keeps them apart by their positions, with the outputs of each document alone. BLOOM does not."""
    from transformers import BloomConfig

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES["llama"]).save_pretrained(tmp_path / "llama")
    bloom = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    AutoModelForCausalLM.from_config(bloom).save_pretrained(tmp_path / "bloom")
    documents = [[5, 9, 2, 44, 7, 61, 3], [8, 2, 2, 17], [33, 12, 5, 6, 9]]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    numbers = torch.tensor([[n for n, document in enumerate(documents) for _ in document]])
    batch = Batch(torch.tensor([sum(documents, [])]), torch.empty(0), torch.empty(0), numbers, 0)
    packed = run_causal_lm(model, batch)[0]
    alone = torch.cat([model(input_ids=torch.tensor([document])).logits[0] for document in documents])
    assert torch.allclose(packed, alone, atol=1e-5)
    check_document_isolation(model, torch.device("cpu"), "llama")
    with pytest.raises(ModelError, match="model.hf=bloom: .*lets a document see the one before it"):
        check_document_isolation(AutoModelForCausalLM.from_pretrained(tmp_path / "bloom"), torch.device("cpu"), "bloom")
