"""Import and export of four model families, compared with transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from raytrain_hpc import export_model, import_model
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import CheckpointError, ModelError
from raytrain_hpc.huggingface.model_configs import build_hf_config, get_family, get_max_positions, parse_hf_config
from raytrain_hpc.huggingface.weight_mapping import build_weight_mappings
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.state.shard_index import StateIndex, TensorSlices, find_missing
from raytrain_hpc.text_generation import load_model
from tests.huggingface.random_models import MODELS, build_random_model, compute_hf_logits
from tests.model_specs import make_model_spec

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 66], [2, 7, 1, 8, 2, 8, 1, 8, 2, 0, 65, 4]])
LAYOUTS = {
    "llama": ["parallel.tp=2"],
    "llama, tied": ["parallel.pp=2"],
    "llama, biases": ["parallel.zero=3"],
    "qwen3": ["parallel.tp=2", "parallel.zero=3", "cluster.workers=4"],
    "qwen3, tied": ["parallel.tp=2", "parallel.pp=2", "cluster.workers=4"],
    "mixtral": ["parallel.ep=2", "parallel.zero=3"],
    "gpt2": ["parallel.tp=2"],
}
ONE_STEP = [
    "data.path=synthetic",
    "data.engine=local",
    "train.steps=1",
    "train.seq_len=16",
    "train.global_batch_size=4",
    "eval.samples=4",
    "logging.sample_tokens=0",
    "optimizer.lr=1e-30",  # too small to change any weight
    "optimizer.weight_decay=0",
    "logging.tensorboard=false",
]


def get_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module", params=MODELS)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """Return a family's name, the transformers model, and the directory of its import."""
    directory = tmp_path_factory.mktemp("model")
    model = build_random_model(request.param)
    model.save_pretrained(directory / "theirs")
    import_model(directory / "theirs", directory / "ours")
    return request.param, model, directory / "ours"


def test_logits_match_transformers(imported: tuple[str, Any, Path]) -> None:
    _, model, run = imported
    decoder, seq_len = load_model(RunDirectory(run))
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), compute_hf_logits(model, TOKENS), rtol=0, atol=1e-5)
    assert seq_len == (40 if model.config.model_type == "gpt2" else 128)


def test_exported_model_equals_the_imported_one(imported: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, model, run = imported
    result = export_model(run, tmp_path / "out", shard_bytes=20_000)
    assert len(result.weight_files) > 2 and result.family == model.config.model_type
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    before, after = get_tensors(model), get_tensors(exported)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(compute_hf_logits(exported, TOKENS), compute_hf_logits(model, TOKENS))
    # Saving with transformers again gives the same tensors under the same names.
    exported.save_pretrained(tmp_path / "theirs")
    assert read_stored_tensors(tmp_path / "out") == read_stored_tensors(tmp_path / "theirs")


def read_stored_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    tensors = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                view = file.get_slice(name)
                tensors[name] = view.get_dtype(), tuple(view.get_shape())
    return tensors


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_are_unchanged_by_a_run_on_any_layout(name: str, pool: Any, tmp_path: Path) -> None:
    model, run = build_random_model(name), tmp_path / "ours"
    model.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", run)
    words = [f"run.init_from={run}", f"run.dir={tmp_path / 'run'}", *ONE_STEP, "cluster.workers=2", *LAYOUTS[name]]
    config = load_config(None, words)
    pool.train(config)
    result = export_model(tmp_path / "run", tmp_path / "out")
    assert result.step == 1
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = get_tensors(model), get_tensors(exported)
    assert all(torch.equal(before[key], after[key]) for key in before)
    # Training on sequences of 16 does not change the model's number of positions.
    assert exported.config.max_position_embeddings == model.config.max_position_embeddings > 16


@pytest.mark.parametrize("name", MODELS)
def test_weight_mappings_cover_the_decoder_exactly_once(name: str) -> None:
    spec = parse_hf_config(build_random_model(name).config.to_dict())
    with torch.device("meta"):
        decoder = Decoder(spec)
    boxes: dict[str, list[Any]] = {}
    for mapping in build_weight_mappings(spec):
        boxes.setdefault(mapping.name, []).append(mapping.box)
    shapes = {key: tuple(parameter.shape) for key, parameter in decoder.named_parameters()}
    assert boxes.keys() == shapes.keys()
    mapped = StateIndex(TensorSlices(key, shapes[key], "float32", tuple(boxes[key])) for key in shapes)
    expected = StateIndex(
        TensorSlices(key, size, "float32", (type(boxes[key][0]).from_shape(size),)) for key, size in shapes.items()
    )
    assert not find_missing([mapped], expected)
    assert sum(box.numel for parameter_boxes in boxes.values() for box in parameter_boxes) == spec.count_parameters()


def test_bf16_weights_are_imported_as_fp32_and_exported_as_requested(tmp_path: Path) -> None:
    model = build_random_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours", shard_bytes=10_000)
    assert len(list((tmp_path / "ours" / "checkpoints" / "step-00000000").glob("*.safetensors"))) > 2
    decoder, _ = load_model(RunDirectory(tmp_path / "ours"))
    assert torch.equal(decoder.embedding.weight, model.model.embed_tokens.weight.float())
    export_model(tmp_path / "ours", tmp_path / "out", dtype="bfloat16")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before, after = get_tensors(model), get_tensors(exported)
    assert after["lm_head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_special_token_ids_of_config_json_are_kept(tmp_path: Path) -> None:
    model = build_random_model("llama")
    model.config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id = [5, 7], 1, 0
    model.config.save_pretrained(tmp_path / "theirs")
    save_file(
        {name: tensor.contiguous() for name, tensor in model.state_dict().items()},
        tmp_path / "theirs" / "model.safetensors",
    )
    import_model(tmp_path / "theirs", tmp_path / "ours")
    export_model(tmp_path / "ours", tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        content = json.loads((tmp_path / "out" / name).read_text())
        assert (content["eos_token_id"], content["bos_token_id"], content["pad_token_id"]) == ([5, 7], 1, 0), name


def test_export_refuses_values_too_large_for_float16(tmp_path: Path) -> None:
    model = build_random_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    model.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(ModelError, match="model.norm.weight has values that float16 cannot hold"):
        export_model(tmp_path / "ours", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])  # the tanh form in one operator, the exact form
def test_import_of_gpt2_without_head_and_with_another_activation(tmp_path: Path, activation: str) -> None:
    config = build_random_model("gpt2").config
    config.activation_function = activation
    model = type(build_random_model("gpt2"))(config).eval()
    model.transformer.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    decoder, _ = load_model(RunDirectory(tmp_path / "ours"))
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), compute_hf_logits(model, TOKENS), rtol=0, atol=1e-5)
    export_model(tmp_path / "ours", tmp_path / "out", dtype="float32")
    expected = "gelu" if activation == "gelu" else "gelu_new"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["activation_function"] == expected


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"model_type": "bloom"}, "model_type='bloom': known are llama, qwen3, mixtral, gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*SiLU"),
        ({"attention_bias": True}, "biases must be in all linear layers or in none"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        (
            {"intermediate_size": 51},
            r"gate_proj.weight is torch.float32 .* implies",
        ),
        ({"num_hidden_layers": 3}, "lack model.layers.2.input_layernorm.weight and 8 more of 30 tensors"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight does not belong"),
        ({"num_attention_heads": None}, "config.json: num_attention_heads is missing"),
    ],
)
def test_unsupported_models_are_refused(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    build_random_model("llama").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ModelError, match=reason):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert {entry.name for entry in tmp_path.iterdir()} == {"theirs"}  # no partial directory is left


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_a_config_without_positions_has_those_of_transformers(name: str) -> None:
    config = build_random_model(name).config
    content = {key: value for key, value in config.to_dict().items() if key != "max_position_embeddings"}
    assert get_max_positions(content) == type(config)().max_position_embeddings


def test_a_copy_of_the_weights_in_another_format_is_ignored(tmp_path: Path) -> None:
    model = build_random_model("llama")
    model.save_pretrained(tmp_path / "theirs")
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, tmp_path / "theirs" / "consolidated.safetensors")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    decoder, _ = load_model(RunDirectory(tmp_path / "ours"))
    assert torch.equal(decoder.embedding.weight, model.model.embed_tokens.weight)


def test_invalid_directories_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config.json: cannot be read: No such file"):
        import_model(tmp_path / "nowhere", tmp_path / "ours")
    build_random_model("llama").save_pretrained(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").touch()
    with pytest.raises(CheckpointError, match="exists already"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    weights = tmp_path / "theirs" / "model.safetensors"
    shutil.copy(weights, tmp_path / "theirs" / "pytorch_model.bin")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model.safetensors: cannot be read"):
        import_model(tmp_path / "theirs", tmp_path / "new")
    weights.unlink()
    with pytest.raises(ModelError, match="pickles are never loaded"):
        import_model(tmp_path / "theirs", tmp_path / "new")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        export_model(tmp_path / "theirs", tmp_path / "new")


@pytest.mark.parametrize(
    "words, reason",
    [
        (["model.norm=layernorm"], "model.norm=layernorm with model.position_embedding=rotary; it would need rmsnorm"),
        (["model.num_experts=4", "model.shared_expert_size=8"], "shared_expert_size"),
        (["model.num_experts=4", "model.load_balancing=bias"], "model.load_balancing=bias"),
        (["model.num_experts=4", "model.experts_per_token=1"], "at least 2 experts"),
        (["model.position_embedding=learned", "model.norm=layernorm", "model.activation=gelu"], "model.bias=False"),
    ],
)
def test_export_refuses_specs_of_no_family(words: list[str], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        get_family(make_model_spec(*words, seq_len=16))


@pytest.mark.parametrize("name", MODELS)
def test_spec_round_trips_through_hf_config(name: str) -> None:
    spec = parse_hf_config(build_random_model(name).config.to_dict())
    assert parse_hf_config(build_hf_config(spec, 64, "float32", {})) == spec
