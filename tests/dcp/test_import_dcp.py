"""`import-dcp` of torchtitan's Llama, compared with a decoder of its own that has torchtitan's names and positions."""

from __future__ import annotations

import io
import json
import math
import pickle
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch.distributed.checkpoint import FileSystemReader

from raytrain_hpc import import_dcp
from raytrain_hpc.cli.main import main
from raytrain_hpc.config.loader import load_config
from raytrain_hpc.config.presets import PRESET_TRAINING, PRESETS
from raytrain_hpc.dcp.chunk_reader import plan_box_copies, split_into_boxes
from raytrain_hpc.dcp.dcp_importer import split_interleaved_heads
from raytrain_hpc.dcp.metadata_reader import DcpChunk, DcpTensor, read_metadata
from raytrain_hpc.driver.run_directory import RunDirectory
from raytrain_hpc.errors import CheckpointError, ConfigError, DataError, ModelError, RaytrainError
from raytrain_hpc.state.shard_index import Box
from raytrain_hpc.text_generation import generate, load_model
from tests.dcp.llama_reference import (
    EPS,
    HEADS,
    KV_HEADS,
    SEQ_LEN,
    THETA,
    VOCAB,
    WIDTH,
    WORDS,
    Llama,
    build_llama,
    save_alone,
    save_sharded,
)
from tests.warm_pool import WarmPool

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 8, 97], [2, 7, 1, 8, 2, 8, 1, 8, 2, 0, 65, 258]])
SHARDED = {"one rank": (1, 1), "FSDP, uneven": (3, 1), "FSDP over TP": (4, 2)}


def assert_same_logits(run: Path, llama: Llama) -> None:
    """Compare in fp64, where a wrong weight or rotation cannot be mistaken for rounding."""
    decoder, seq_len = load_model(RunDirectory(run))
    with torch.no_grad():
        torch.testing.assert_close(decoder.double()(TOKENS), llama.double()(TOKENS), rtol=0, atol=1e-12)
    assert seq_len == SEQ_LEN


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_alone(tmp_path_factory.mktemp("saved") / "dcp", build_llama().state_dict())


@pytest.mark.parametrize("name", SHARDED)
def test_logits_are_those_of_the_saved_model(name: str, pool: WarmPool, tmp_path: Path) -> None:
    world_size, tensor_parallel = SHARDED[name]
    pool.call(save_sharded, world_size, tmp_path / "dcp", world_size, tensor_parallel)
    tensors = read_metadata(tmp_path / "dcp").tensors
    assert len(tensors["layers.0.attention.wo.weight"].chunks) == world_size
    # Small boxes and files, so that tensors are written in several.
    result = import_dcp(tmp_path / "dcp", tmp_path / "run", WORDS, box_bytes=1500, shard_bytes=20_000)
    assert result.ignored == ("dataloader", "optimizer", "train_state") and result.rotary_layout == "interleaved"
    spec = result.model_spec
    assert (spec.num_heads, spec.num_kv_heads, spec.rope_theta, spec.norm_eps) == (HEADS, KV_HEADS, THETA, EPS)
    assert_same_logits(tmp_path / "run", build_llama())
    assert len(list((tmp_path / "run" / "checkpoints" / "step-00000000").glob("*.safetensors"))) > 2


def test_one_chunk_is_in_memory_at_a_time(pool: WarmPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool.call(save_sharded, 3, tmp_path / "dcp", 3, 1)
    chunks: list[weakref.ref[torch.Tensor]] = []
    load = torch.load

    def load_alone(*arguments: Any, **options: Any) -> torch.Tensor:
        assert not any(chunk() is not None for chunk in chunks)
        loaded: torch.Tensor = load(*arguments, **options)
        chunks.append(weakref.ref(loaded))
        return loaded

    monkeypatch.setattr(torch, "load", load_alone)
    import_dcp(tmp_path / "dcp", tmp_path / "run", WORDS, box_bytes=1500)
    weights = {key: tensor for key, tensor in read_metadata(tmp_path / "dcp").tensors.items() if "optim" not in key}
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000000/manifest.json").read_text())
    boxes = [part["sizes"] for tensor in manifest["index"].values() for part in tensor["parts"]]
    assert max(4 * math.prod(sizes) for sizes in boxes) <= 1500 < 4 * VOCAB * WIDTH
    assert len(chunks) < 1.5 * sum(len(tensor.chunks) for tensor in weights.values())  # few are read twice


@pytest.mark.parametrize(
    "options, rotary_layout",
    [
        (("qk_norm", "halves"), "auto"),
        (("qk_norm",), "interleaved"),
        (("halves",), "half"),
        (("tied",), "auto"),
        (("scaled",), "auto"),
    ],
)
def test_variants_of_the_architecture(options: tuple[str, ...], rotary_layout: Any, tmp_path: Path) -> None:
    llama = build_llama(**dict.fromkeys(options, True))
    save_alone(tmp_path / "dcp", llama.state_dict())
    words = [*WORDS, f"model.tie_embeddings={str('tied' in options).lower()}"]
    words += ["model.rope_factor=8", "model.rope_original_max_positions=16"] if "scaled" in options else []
    result = import_dcp(tmp_path / "dcp", tmp_path / "run", words, rotary_layout=rotary_layout)
    assert result.model_spec.qk_norm is ("qk_norm" in options) and result.ignored == ()
    assert result.model_spec.tie_embeddings is ("tied" in options)
    assert result.rotary_layout == ("half" if "halves" in options else "interleaved")
    assert_same_logits(tmp_path / "run", llama)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"model.{name}",
        lambda name: f"_orig_mod.{name}",
        lambda name: re.sub(r"^layers\.\d+", r"\g<0>._checkpoint_wrapped_module._orig_mod", name),
        lambda name: name.replace("attention.w", "attention.qkv_linear.w").replace("qkv_linear.wo", "wo"),
        lambda name: name.replace("output.", "lm_head."),
    ],
)
def test_names_of_wrappers_and_of_newer_versions(rename: Callable[[str], str], tmp_path: Path) -> None:
    llama = build_llama()
    state = {rename(name): tensor for name, tensor in llama.state_dict().items()}
    assert state.keys() != llama.state_dict().keys()
    save_alone(tmp_path / "dcp", state | {"freqs_cis": torch.ones(48, 4, dtype=torch.complex64)})
    import_dcp(tmp_path / "dcp", tmp_path / "run", WORDS)
    assert_same_logits(tmp_path / "run", llama)


def test_sizes_come_from_params_json_and_recipes(saved: Path, tmp_path: Path) -> None:
    params = {"n_heads": HEADS, "n_kv_heads": KV_HEADS, "rope_theta": THETA, "norm_eps": EPS, "multiple_of": 256}
    (tmp_path / "params.json").write_text(json.dumps(params | {"n_layers": 2, "dim": 32}))
    import_dcp(saved, tmp_path / "run", [f"train.seq_len={SEQ_LEN}"], params=tmp_path / "params.json")
    assert_same_logits(tmp_path / "run", build_llama())
    scaling = {"scaling_factor": 8.0, "original_max_position_embeddings": 16}
    (tmp_path / "params.json").write_text(json.dumps(params | {"rope_scaling_args": scaling, "max_seq_len": 9}))
    spec = import_dcp(saved, tmp_path / "scaled", params=tmp_path / "params.json").model_spec
    assert (spec.rope_factor, spec.rope_original_max_positions) == (8.0, 16)
    (tmp_path / "params.json").write_text(json.dumps(params | {"use_scaled_rope": True}))
    with pytest.raises(ConfigError, match=r"model\.rope_factor=''.*add model.rope_factor=8 \(Llama 3.1\)"):
        import_dcp(saved, tmp_path / "no", params=tmp_path / "params.json")
    (tmp_path / "mine.yaml").write_text(
        f"model: {{num_heads: {HEADS}, rope_theta: {THETA}, norm_eps: {EPS}}}\n"
        f"train: {{seq_len: {SEQ_LEN}, steps: 7}}\ncluster: {{workers: 64}}\n"
    )
    import_dcp(saved, tmp_path / "from_recipe", recipe=str(tmp_path / "mine.yaml"))
    assert_same_logits(tmp_path / "from_recipe", build_llama())


def test_sizes_come_from_a_preset(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = {"hidden_size": 32, "num_heads": HEADS, "num_kv_heads": KV_HEADS, "tie_embeddings": False}
    monkeypatch.setitem(PRESETS, "tiny", preset | {"vocab_size": 259, "rope_theta": THETA, "norm_eps": EPS})
    monkeypatch.setitem(PRESET_TRAINING, "tiny", {"train.seq_len": SEQ_LEN})
    import_dcp(saved, tmp_path / "run", ["model.preset=tiny"])
    assert_same_logits(tmp_path / "run", build_llama())


def test_a_run_starts_from_the_import(saved: Path, pool: WarmPool, tmp_path: Path) -> None:
    import_dcp(saved, tmp_path / "run", WORDS, tokenizer="byte")
    words = f"""
        run.init_from={tmp_path / "run"} run.dir={tmp_path / "trained"} data.path=synthetic data.engine=local
        train.steps=1 train.seq_len=16 train.global_batch_size=4 optimizer.lr=1e-30 optimizer.weight_decay=0
        logging.tensorboard=false parallel.zero=3 cluster.workers=2
    """
    pool.train(load_config(None, words.split()))
    before, after = (load_model(RunDirectory(tmp_path / name))[0] for name in ("run", "trained"))
    assert all(torch.equal(after.state_dict()[key], tensor) for key, tensor in before.state_dict().items())
    text = "".join(generate(tmp_path / "run", "a", max_tokens=16, temperature=0))
    tokens, llama = [97], build_llama()
    for _ in range(16):
        tokens.append(int(llama(torch.tensor([tokens]))[0, -1, :256].argmax()))
    assert text and bytes(tokens[1:]).decode(errors="replace").startswith(text)


def test_the_command_prints_what_it_read(saved: Path, tmp_path: Path) -> None:
    arguments = ["import-dcp", str(saved), str(tmp_path / "run"), *WORDS, "--tokenizer", "byte"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    numbers, rotary, following = result.output.splitlines()
    count = sum(parameter.numel() for parameter in build_llama().parameters())
    assert numbers == f"{count:,} parameters, tokenizer: byte"
    assert rotary == "rotary positions: interleaved channel pairs, base 5000, not scaled (model.rope_factor=1)"
    assert following == f"next: raytrain-hpc train run.init_from={tmp_path / 'run'}"
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2 and again.output.count("\n") == 1 and "exists already" in again.output


def test_state_that_is_not_imported_is_named(tmp_path: Path) -> None:
    llama = build_llama()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=0.0)
    llama(TOKENS).sum().backward()
    optimizer.step()
    losses = {"losses": io.BytesIO(b"...")}
    save_alone(tmp_path / "dcp", {"model": llama.state_dict(), "optim": optimizer.state_dict(), "train_state": losses})
    output = CliRunner().invoke(main, ["import-dcp", str(tmp_path / "dcp"), str(tmp_path / "run"), *WORDS]).output
    assert_same_logits(tmp_path / "run", llama)
    assert "not imported: optim, train_state; training starts with a new optimizer state\n" in output


@pytest.mark.parametrize(
    "words, error, problem",
    [
        (
            WORDS[1:],
            ConfigError,
            r"model\.num_heads=''.*is not stored in .*; give the number of attention heads as",
        ),
        ([WORDS[0], *WORDS[2:]], ConfigError, r"model\.rope_theta=''.*the base of the rotary frequencies"),
        ([*WORDS[:2], WORDS[3]], ConfigError, r"model\.norm_eps=''.*the epsilon of the norms"),
        (WORDS[:3], ConfigError, r"train\.seq_len=''.*the context length"),
        (
            [*WORDS, "model.num_heads=3"],
            ConfigError,
            r"model\.num_heads=3 \(command line\): must divide .*=32",
        ),
        (
            [*WORDS, "model.num_heads=1"],
            ConfigError,
            r"model\.num_heads=1.*32 channels.* does not divide the 16 rows",
        ),
        ([*WORDS, "model.hidden_size=64"], ConfigError, r"model\.hidden_size=64.*imply 32; remove it"),
        ([*WORDS, "model.num_kv_heads=1"], ConfigError, r"model\.num_kv_heads=1.*imply 2; remove it"),
        (
            [*WORDS, "model.preset=llama3_8b"],
            ConfigError,
            r"model\.\w+=\d+ \(preset llama3_8b\): .*imply \d+",
        ),
        ([*WORDS, "model.norm=layernorm"], ConfigError, r"model\.norm='layernorm'.*imply rmsnorm"),
        ([*WORDS, "train.steps=4"], ConfigError, r"train\.steps=4.*takes model\.\* and train\.seq_len"),
        ([*WORDS, "model.tie_embeddings=true"], ModelError, r"output\.weight differs from tok_embeddings\.weight"),
    ],
)
def test_wrong_settings_are_refused(
    saved: Path, tmp_path: Path, words: list[str], error: type[RaytrainError], problem: str
) -> None:
    with pytest.raises(error, match=problem) as raised:
        import_dcp(saved, tmp_path / "run", words)
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2
    assert not list(tmp_path.iterdir())


def test_a_location_in_an_object_store_is_refused(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="only a local directory can be written"):
        import_dcp(saved, "s3://bucket/run", WORDS)


def test_wrong_tokenizers_are_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'char': only byte, hf:PATH and tiktoken:FILE exist"):
        import_dcp(saved, tmp_path / "run", WORDS, tokenizer="char")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda state: state.pop("norm.weight"), r"lacks norm\.weight and 0 more of 21 weights"),
        (lambda state: state.pop("tok_embeddings.weight"), r"has no tok_embeddings\.weight; .*it has layers\.0"),
        (
            lambda state: state.update({"layers.0.moe.w": torch.ones(2)}),
            r"layers\.0\.moe\.w does not belong to",
        ),
        (lambda state: state.update({"model.norm.weight": torch.ones(32)}), "are two tensors for norm.weight"),
        (
            lambda state: state.update({"layers.1.feed_forward.w1.weight": torch.ones(51, 32)}),
            r"layers\.1\.feed_forward\.w1\.weight is \[51, 32\]; the other weights imply \[50, 32\]",
        ),
    ],
)
def test_other_models_are_refused(tmp_path: Path, change: Callable[[dict[str, Any]], Any], problem: str) -> None:
    state = build_llama().state_dict()
    change(state)
    save_alone(tmp_path / "dcp", state)
    with pytest.raises(ModelError, match=problem):
        import_dcp(tmp_path / "dcp", tmp_path / "run", WORDS)
    assert not (tmp_path / "run").exists()


def replace_metadata(directory: Path, change: Callable[[Any], Any]) -> None:
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


def truncate(directory: Path) -> None:
    (path,) = directory.glob("*.distcp")
    path.write_bytes(path.read_bytes()[:-1])


def overwrite_chunks(directory: Path, content: object) -> None:
    """Replace the chunks of the file by another object."""
    file = io.BytesIO()
    torch.save(content, file)
    (path,) = directory.glob("*.distcp")
    data, length = bytearray(path.read_bytes()), len(file.getvalue())

    def overwrite(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            data[info.offset : info.offset + length] = file.getvalue()
            info.length = length

    replace_metadata(directory, overwrite)
    path.write_bytes(data)


class Executed:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("code of a chunk was executed",))


def drop_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["norm.weight"].chunks.clear()


def double_chunk(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["norm.weight"].chunks
    chunks.append(chunks[0])


def set_dtype(dtype: torch.dtype) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata.state_dict_metadata["norm.weight"].properties, "dtype", dtype)


@pytest.mark.parametrize(
    "damage, problem",
    [
        (truncate, r"\.distcp: is truncated: \d+ bytes, of which \.metadata needs \d+"),
        (lambda directory: next(directory.glob("*.distcp")).unlink(), r"\.distcp: cannot be read: No such file"),
        (lambda directory: replace_metadata(directory, drop_chunk), r"norm\.weight\[0:32\] is missing: no chunk"),
        (lambda directory: replace_metadata(directory, double_chunk), r"norm\.weight\[0:32\] is in two chunks"),
        (
            lambda directory: replace_metadata(directory, set_dtype(torch.int8)),
            r"norm\.weight is int8; only float64, float32, float16, bfloat16 can be imported",
        ),
        (
            lambda directory: replace_metadata(directory, set_dtype(torch.float16)),
            r"norm\.weight\[0:32\] is float32 \[32\]; \.metadata says float16 \[32\]",
        ),
        (lambda directory: overwrite_chunks(directory, torch.ones(3)), r"is float32 \[3\]; \.metadata says float32"),
        (lambda directory: overwrite_chunks(directory, [1]), r"is list; \.metadata says float32"),
        (
            lambda directory: overwrite_chunks(directory, Executed()),
            r"tok_embeddings\.weight.*cannot be read: W",
        ),
    ],
)
def test_damaged_directories_are_refused(damage: Callable[[Path], Any], problem: str, tmp_path: Path) -> None:
    save_alone(tmp_path / "dcp", build_llama().state_dict())
    damage(tmp_path / "dcp")
    with pytest.raises(CheckpointError, match=problem) as raised:
        import_dcp(tmp_path / "dcp", tmp_path / "run", WORDS)
    assert "\n" not in str(raised.value) and raised.value.exit_code == 2
    assert {path.name for path in tmp_path.iterdir()} == {"dcp"}  # no partial run directory is left


def make_tensor(shape: tuple[int, ...], boxes: list[Box]) -> DcpTensor:
    return DcpTensor("w", shape, "float32", tuple(DcpChunk(box, "f", 0, 0) for box in boxes))


@pytest.mark.parametrize("row_multiple", [1, 4, 8])
@pytest.mark.parametrize("max_bytes", [1, 400, 1 << 20])
@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (24, 10))],
        [Box((0, 0), (9, 10)), Box((9, 0), (9, 10)), Box((18, 0), (6, 10))],
        [Box((row, column), (size, 5)) for row, size in ((0, 7), (7, 7), (14, 10)) for column in (0, 5)],
    ],
    ids=["one", "uneven rows", "grid"],
)
def test_boxes_cover_a_tensor_without_dividing_groups_of_rows(
    boxes: list[Box], max_bytes: int, row_multiple: int
) -> None:
    tensor = make_tensor((24, 10), boxes)
    count = torch.zeros(24, 10)
    parts = split_into_boxes(tensor, row_multiple, max_bytes)
    for part, copies in zip(parts, plan_box_copies(tensor, parts), strict=True):
        assert part.offsets[0] % row_multiple == 0 and part.ends[0] % row_multiple == 0
        assert sum(copy.region.numel for copy in copies) == part.numel
        count[part.to_slices(Box.from_shape((24, 10)))] += 1
    assert torch.equal(count, torch.ones(24, 10))
    assert all(4 * part.numel <= max(max_bytes, 4 * row_multiple * part.sizes[1]) for part in parts)
    assert len(parts) == 1 or max_bytes < 4 * count.numel()


def test_heads_are_reordered_from_neighbors_to_halves() -> None:
    rows = torch.arange(12.0).reshape(12, 1)
    assert split_interleaved_heads(rows, 6).flatten().tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert split_interleaved_heads(rows[:, 0], 4).tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]
