"""Models of four families, in and out, beside transformers itself."""

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
from raytrain_hpc.huggingface.model_configs import build_hf_config, get_family, parse_hf_config
from raytrain_hpc.huggingface.weight_mapping import build_weight_mappings
from raytrain_hpc.model.decoder import Decoder
from raytrain_hpc.state.shard_index import StateIndex, TensorSlices, find_missing
from raytrain_hpc.text_generation import load_model
from tests.huggingface.random_models import MODELS, build_random_model, compute_hf_logits
from tests.model_specs import make_model_spec as shape_of_words

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
    "train.global_batch=4",
    "train.lr=1e-30",  # too little to change any weight
    "train.weight_decay=0",
    "observe.tensorboard=false",
]


def get_tensors(model: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module", params=MODELS)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family's name, transformers' own model, and where it was imported."""
    directory = tmp_path_factory.mktemp("model")
    model = build_random_model(request.param)
    model.save_pretrained(directory / "theirs")
    import_model(directory / "theirs", directory / "ours")
    return request.param, model, directory / "ours"


def test_logits_are_those_of_transformers(imported: tuple[str, Any, Path]) -> None:
    _, model, run = imported
    decoder, context = load_model(RunDirectory(run))
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), compute_hf_logits(model, TOKENS), rtol=0, atol=1e-5)
    assert context == (40 if model.config.model_type == "gpt2" else 128)


def test_what_is_exported_is_what_was_imported(imported: tuple[str, Any, Path], tmp_path: Path) -> None:
    _, model, run = imported
    made = export_model(run, tmp_path / "out", shard_bytes=20_000)
    assert len(made.weight_files) > 2 and made.family == model.config.model_type
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    before, after = get_tensors(model), get_tensors(again)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(compute_hf_logits(again, TOKENS), compute_hf_logits(model, TOKENS))
    # What transformers then saves itself has the same tensors under the same names in it.
    again.save_pretrained(tmp_path / "theirs")
    assert read_stored_tensors(tmp_path / "out") == read_stored_tensors(tmp_path / "theirs")


def read_stored_tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is no dict)
                view = file.get_slice(name)
                found[name] = view.get_dtype(), tuple(view.get_shape())
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_on_the_way(name: str, pool: Any, tmp_path: Path) -> None:
    model, run = build_random_model(name), tmp_path / "ours"
    model.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", run)
    words = [f"run.init_from={run}", f"run.dir={tmp_path / 'run'}", *ONE_STEP, "cluster.workers=2", *LAYOUTS[name]]
    config = load_config(None, words)
    pool.train(config)
    made = export_model(tmp_path / "run", tmp_path / "out")
    assert made.step == 1
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = get_tensors(model), get_tensors(again)
    assert all(torch.equal(before[key], after[key]) for key in before)
    # It was trained on sequences of 16, and is made for as many positions as before.
    assert again.config.max_position_embeddings == model.config.max_position_embeddings > 16


@pytest.mark.parametrize("name", MODELS)
def test_twins_are_the_decoder_once(name: str) -> None:
    """Every element of every parameter, and none twice."""
    shape = parse_hf_config(build_random_model(name).config.to_dict())
    with torch.device("meta"):
        decoder = Decoder(shape)
    boxes: dict[str, list[Any]] = {}
    for twin in build_weight_mappings(shape):
        boxes.setdefault(twin.name, []).append(twin.box)
    whole = {key: tuple(parameter.shape) for key, parameter in decoder.named_parameters()}
    assert boxes.keys() == whole.keys()
    held = StateIndex(TensorSlices(key, whole[key], "float32", tuple(boxes[key])) for key in whole)
    wanted = StateIndex(
        TensorSlices(key, size, "float32", (type(boxes[key][0]).whole(size),)) for key, size in whole.items()
    )
    assert not find_missing([held], wanted)
    assert sum(box.numel for of_one in boxes.values() for box in of_one) == shape.num_parameters()


def test_narrow_weights_come_in_wide_and_go_out_as_asked(tmp_path: Path) -> None:
    model = build_random_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours", shard_bytes=10_000)
    assert len(list((tmp_path / "ours" / "checkpoints" / "step-00000000").glob("*.safetensors"))) > 2
    wide, _ = load_model(RunDirectory(tmp_path / "ours"))
    assert torch.equal(wide.embedding.weight, model.model.embed_tokens.weight.float())
    export_model(tmp_path / "ours", tmp_path / "out", dtype="bfloat16")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before, after = get_tensors(model), get_tensors(again)
    assert after["lm_head.weight"].dtype == torch.bfloat16
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_ends_that_only_config_json_names_come_along(tmp_path: Path) -> None:
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
        said = json.loads((tmp_path / "out" / name).read_text())
        assert (said["eos_token_id"], said["bos_token_id"], said["pad_token_id"]) == ([5, 7], 1, 0), name


def test_values_that_are_too_large_for_float16(tmp_path: Path) -> None:
    model = build_random_model("llama")
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    model.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    with pytest.raises(ModelError, match="model.norm.weight has values that float16 cannot hold"):
        export_model(tmp_path / "ours", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


def test_gpt2_saved_without_its_head_and_with_the_other_name_of_its_activation(tmp_path: Path) -> None:
    model = build_random_model("gpt2")
    model.config.activation_function = "gelu_pytorch_tanh"  # the same function in one operation
    model.transformer.save_pretrained(tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "ours")
    decoder, _ = load_model(RunDirectory(tmp_path / "ours"))
    with torch.no_grad():
        torch.testing.assert_close(decoder(TOKENS), compute_hf_logits(model, TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"model_type": "bloom"}, "model_type='bloom': known are llama, qwen3, mixtral, gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*SiLU"),
        ({"attention_bias": True}, "biases are in all products or in none"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "'yarn'"),
        (
            {"intermediate_size": 51},
            r"gate_proj.weight is torch.float32 .* makes it",
        ),
        ({"num_hidden_layers": 3}, "lack model.layers.2.input_layernorm.weight and 8 more of 30 tensors"),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight has no place"),
        ({"num_attention_heads": None}, "config.json: num_attention_heads is missing"),
    ],
)
def test_a_model_that_no_decoder_can_be(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    build_random_model("llama").save_pretrained(tmp_path / "theirs")
    path = tmp_path / "theirs" / "config.json"
    config = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    with pytest.raises(ModelError, match=reason):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert {entry.name for entry in tmp_path.iterdir()} == {"theirs"}  # nothing half made is left


def test_directories_that_are_wrong(tmp_path: Path) -> None:
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
    with pytest.raises(ModelError, match="pickles, which can run code and are never loaded"):
        import_model(tmp_path / "theirs", tmp_path / "new")
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        export_model(tmp_path / "theirs", tmp_path / "new")


@pytest.mark.parametrize(
    "words, reason",
    [
        (["model.norm=layernorm"], "model.norm=layernorm together with model.positions=rotary; it would need rmsnorm"),
        (["model.num_experts=4", "model.shared_expert_size=8"], "shared_expert_size"),
        (["model.num_experts=4", "model.balance=bias"], "model.balance=bias"),
        (["model.num_experts=4", "model.experts_per_token=1"], "at least 2 experts"),
        (["model.positions=learned", "model.norm=layernorm", "model.activation=gelu"], "model.bias=False"),
    ],
)
def test_a_shape_that_no_family_has(words: list[str], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        get_family(shape_of_words(*words, seq_len=16))


@pytest.mark.parametrize("name", MODELS)
def test_shapes_survive_the_way_there_and_back(name: str) -> None:
    shape = parse_hf_config(build_random_model(name).config.to_dict())
    assert parse_hf_config(build_hf_config(shape, 64, "float32", {})) == shape
