"""Sources of settings other than well-formed files: dicts, attributes, duplicate keys, former and foreign names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from raytrain_hpc.api import load_config, plan, run_script, start, train
from raytrain_hpc.cli.recipes import format_expectation
from raytrain_hpc.config.aliases import FOREIGN_NAMES, FORMER_KEYS, suggest_key
from raytrain_hpc.config.fixed_settings import find_changed_setting
from raytrain_hpc.config.json_schema import make_schema
from raytrain_hpc.config.loader import complete_config, config_to_yaml
from raytrain_hpc.config.model_spec import resolve_model_spec
from raytrain_hpc.config.recipes import RECIPE_DIR, list_recipes, read_description
from raytrain_hpc.config.schema import CallbackConfig, Config, ModelConfig, get_fields, to_dict
from raytrain_hpc.config.value_types import convert_value, get_type
from raytrain_hpc.errors import ConfigError

# The names in VOCABULARY's table of aliases that other trainers use.
# fmt: off
TABLE = [
    "learning_rate", "lr", "max_steps", "num_train_epochs", "per_device_train_batch_size",
    "gradient_accumulation_steps", "train_batch_size", "max_grad_norm", "clip_grad", "bf16", "precision",
    "mixed_precision", "gradient_checkpointing", "activation_checkpoint", "fsdp", "sharding_strategy",
    "tensor_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_parallel_size", "num_nodes", "devices", "nproc_per_node", "world_size", "output_dir", "save_steps",
    "save_interval", "logging_steps", "log_interval", "eval_steps", "warmup_ratio", "lr_scheduler_type", "n_layer",
    "n_head", "n_embd", "d_model", "dim", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_seq_len", "block_size", "context_length", "use_wandb", "resume_from_checkpoint",
]
# fmt: on


def test_dicts_give_the_same_config_as_words() -> None:
    words = ["train.steps=7", "optimizer.lr=0.01", "data.sources=[{path: a, weight: 2}]", "checkpoint.async=false"]
    nested = {
        "train": {"steps": 7},
        "optimizer.lr": 0.01,
        "data": {"sources": [{"path": "a", "weight": 2}]},
        "checkpoint": {"async": False},
    }
    assert load_config(nested) == load_config(None, words) == load_config(None, nested)
    assert load_config(nested, ["train.steps=8"]).train.steps == 8
    assert load_config(nested).origin("train.steps") == "dict"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": {"stepz": 1}}, "train.stepz=1 (dict): no such key; did you mean train.steps?"),
        ({"train": {"steps": "many"}}, "train.steps='many' (dict): needs a whole number"),
        ({"train": 5}, "train is a section"),
        ({"data": {"sources": [{"pat": "a"}]}}, "pat: did you mean path?"),
        ({"data": {"sources": [{"path": "a", "weight": "heavy"}]}}, "weight='heavy': needs a number"),
    ],
)
def test_wrong_dict_is_a_one_line_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(settings)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda: load_config("quickstart", "train.steps=3"), "overrides='train.steps=3' (load_config): needs a list"),
        (lambda: load_config("quickstart", [3]), "overrides=3 (load_config): is not a key=value word"),  # type: ignore[list-item]
        (lambda: load_config("quickstart", 3), "overrides=3 (load_config): needs a list"),  # type: ignore[arg-type]
        (lambda: load_config(["train.steps=3"]), "source=['train.steps=3'] (load_config): needs a file"),  # type: ignore[arg-type]
        (
            lambda: load_config(None, ["train.steps"]),
            "train.steps='' (load_config): is not a setting; write train.steps=",
        ),
        (lambda: load_config("train.steps"), "train.steps='': has no value; write train.steps=VALUE"),
        (lambda: load_config(None, ["train.stps=3"]), "train.stps=3 (load_config): no such key"),
        (lambda: train("quickstart"), "config='quickstart': is not a Config; pass load_config('quickstart')"),  # type: ignore[arg-type]
        (lambda: start("quickstart"), "config='quickstart': is not a Config"),  # type: ignore[arg-type]
        (lambda: plan("quickstart"), "config='quickstart': is not a Config"),  # type: ignore[arg-type]
        (lambda: run_script("quickstart", "x.py"), "config='quickstart': is not a Config"),  # type: ignore[arg-type]
    ],
)
def test_wrong_argument_is_a_one_line_error(load: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_sections_refuse_attributes_that_are_no_keys() -> None:
    config = load_config()
    with pytest.raises(ConfigError, match=r"train.stpes=5: no such key; did you mean steps\?"):
        config.train.stpes = 5  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="lr_scheduler.warmup=5: no such key"):
        config.lr_scheduler.warmup = 5  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no such key"):
        config.trian = 5  # type: ignore[attr-defined]


def test_config_made_by_hand_is_checked_and_completed() -> None:
    config = Config()
    config.run.name = "mine"
    complete_config(config)
    assert config.run.dir == "runs/mine"
    config.train.steps = "ten"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="train.steps='ten': needs a whole number"):
        complete_config(config)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("train:\n  steps: 5\n  seq_len: 8\n  steps: 6\n", "lines 2 and 4"),
        ("train:\n  steps: 5\nrun:\n  seed: 1\ntrain:\n  seq_len: 8\n", "lines 1 and 5"),
        ("data:\n  sources:\n  - path: a\n    path: b\n", "lines 3 and 4"),
    ],
)
def test_duplicate_keys_are_refused_with_both_lines(tmp_path: Path, text: str, lines: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError, match=f"is given twice, in {lines}"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize("word", ["logging.wandb_project=true", "logging.mlflow_uri=False", "run.name=true"])
def test_text_keys_are_no_switches(tmp_path: Path, word: str) -> None:
    section, _, rest = word.partition(".")
    (tmp_path / "a.yaml").write_text(f"{section}: {{{rest.replace('=', ': ')}}}")
    for arguments in ((None, [word]), (tmp_path / "a.yaml",)):
        with pytest.raises(ConfigError, match="needs text, such as a name"):
            load_config(*arguments)  # type: ignore[arg-type]


def test_every_name_of_the_alias_table_is_answered() -> None:
    assert set(TABLE) <= set(FOREIGN_NAMES)
    for old, new in [*FORMER_KEYS.items(), *FOREIGN_NAMES.items()]:
        assert suggest_key(old) == f"did you mean {new}?"
        key, equals, value = new.partition(" ")[0].partition("=")
        assert key.rstrip(",") in get_fields(), new
        if equals:
            assert load_config(None, [f"{key}={value}"])
    for old in FORMER_KEYS:
        assert old not in get_fields()


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [("train.lrr", "optimizer.lr"), ("train.stepz", "train.steps"), ("optim.lr", "optimizer.lr"), ("seed", "run.seed")],
)
def test_misspelled_key_is_answered(key: str, suggestion: str) -> None:
    assert suggest_key(key) == f"did you mean {suggestion}?"


def test_former_section_of_a_file_is_answered_by_key(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("observe:\n  log_every: 5\n")
    with pytest.raises(ConfigError, match=r"observe.log_every=5 .*a.yaml:2\): .*mean logging.interval"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("value", "key", "converted"),
    [
        ("1e9", "train.steps", 1_000_000_000),
        (3.0, "train.steps", 3),
        (3, "optimizer.lr", 3.0),
        ("1e-4", "optimizer.lr", 1e-4),
        ("auto", "train.micro_batch_size", "auto"),
        ("8", "train.micro_batch_size", 8),
        (True, "train.deterministic", True),
        ("elastic", "train.deterministic", "elastic"),
        ((0, 1), "profiler.ranks", [0, 1]),
    ],
)
def test_values_are_converted_to_the_declared_type(value: Any, key: str, converted: Any) -> None:
    result = convert_value(value, get_type(key))
    assert result == converted and type(result) is type(converted)


@pytest.mark.parametrize(
    ("value", "key"),
    [(True, "train.steps"), (1, "train.compile"), ("yes", "train.compile"), (1.5, "train.steps"), (None, "run.name")]
    + [(5, "run.name"), ("a", "profiler.ranks"), ([1.5], "profiler.ranks"), ("inf", "train.steps")],
)
def test_values_of_other_types_are_refused(value: Any, key: str) -> None:
    with pytest.raises(ValueError, match="needs "):
        convert_value(value, get_type(key))


def test_references_are_resolved_and_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    words = ["run.dir=${oc.env:SCRATCH}/${run.name}", "eval.interval=${train.steps}", "train.steps=12"]
    config = load_config(None, words)
    assert (config.run.dir, config.eval.interval) == ("/scratch/quickstart", 12)
    with pytest.raises(ConfigError, match=r"train.steps='quickstart'.*needs a whole number"):
        load_config(None, ["train.steps=${run.name}"])


def test_values_of_python_are_those_that_a_resumed_run_reads() -> None:
    betas = {"betas": (np.float64(0.9), 0.95), "eps": np.float32(0.5), "sizes": np.arange(2), "to": Path("a/b")}
    settings = {"optimizer.name": "torch.optim.NAdam", "optimizer.args": betas, "optimizer.lr": np.float64(0.01)}
    callbacks = [{"name": "ema", "args": {"decay": np.float64(0.9), "groups": {"a": (1, 2)}}}]
    loaded = load_config({**settings, "train.callbacks": callbacks})
    assigned = load_config()
    assigned.optimizer.name, assigned.optimizer.args = "torch.optim.NAdam", betas
    assigned.optimizer.lr, assigned.profiler.steps = np.float64(0.01), (10, 15)  # type: ignore[assignment]
    assigned.train.callbacks = [CallbackConfig("ema", dict(callbacks[0]["args"]))]  # type: ignore[arg-type]
    complete_config(assigned)
    for config in (loaded, assigned):
        stored = yaml.safe_load(config_to_yaml(config))
        assert stored["optimizer"]["args"] == {"betas": [0.9, 0.95], "eps": 0.5, "sizes": [0, 1], "to": "a/b"}
        assert stored["train"]["callbacks"] == [{"name": "ema", "args": {"decay": 0.9, "groups": {"a": [1, 2]}}}]
        assert stored == to_dict(config)
        assert find_changed_setting(stored, config) is None
    with pytest.raises(ConfigError, match="optimizer.args=.*takes text, numbers, lists and mappings, not a function"):
        load_config({"optimizer.args": {"schedule": write_checkpoint}})
    assigned.train.callbacks[0].args["hook"] = {1, 2}
    with pytest.raises(ConfigError, match="train.callbacks=.*args=.*takes .* not a set"):
        complete_config(assigned)


def write_checkpoint(run_dir: Path, step: int, **model: Any) -> None:
    """Write the part of a run directory that the settings of its model are read from."""
    spec = resolve_model_spec(ModelConfig(hidden_size=64, num_heads=4, **model), vocab_size=65, seq_len=32)
    directory = run_dir / "checkpoints" / f"step-{step:08}"
    directory.mkdir(parents=True)
    manifest = {"meta": {"model": asdict(spec), "seq_len": 32, "positions": 48}}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def test_a_run_with_a_checkpoint_does_not_need_the_one_that_it_started_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BASE", "base")
    write_checkpoint(tmp_path / "base", 0, num_layers=3)
    words = ["run.init_from=${oc.env:BASE}", "run.dir=runs/${run.name}", "run.name=tuned"]
    config = load_config(None, [*words, "model.dropout=0.1"])
    assert (config.model.num_layers, config.model.max_positions, config.model.dropout) == (3, 48, 0.1)
    assert config.origin("model.num_layers") == "base"
    run = tmp_path / "runs" / "tuned"
    write_checkpoint(run, 5, num_layers=3, dropout=0.1)
    with pytest.raises(ConfigError, match="run.init_from='none'.*has no checkpoint"):
        load_config(None, ["run.init_from=none", "run.dir=runs/tuned"])  # a run that is not known to be from there
    (run / "config.yaml").write_text(config_to_yaml(config))
    (tmp_path / "base").rename(tmp_path / "gone")
    resumed = load_config(None, words)
    assert resumed.model == config.model and resumed.run == config.run
    assert load_config(run / "config.yaml").model == config.model
    with pytest.raises(ConfigError, match="run.init_from='none'.*has no checkpoint"):
        load_config(None, [*words, "run.init_from=none"])
    with pytest.raises(ConfigError, match="run.init_from=.*base'.*has no checkpoint"):
        load_config(None, [*words, "run.dir=runs/other"])
    (run / "config.yaml").write_text("run: [")
    with pytest.raises(ConfigError, match="run.dir='runs/tuned': cannot be read: .*; choose another run.dir"):
        load_config(None, words)


def test_preset_brings_its_training_defaults() -> None:
    config = load_config({"model.preset": "llama3_70b"})
    assert (config.train.seq_len, config.train.dtype, config.optimizer.lr) == (8192, "bf16", 1.5e-4)
    assert config.origin("train.seq_len") == "preset llama3_70b"
    assert load_config({"model.preset": "llama3_70b", "train.seq_len": 99}).train.seq_len == 99


@pytest.mark.parametrize("name", list_recipes())
def test_recipe_states_what_the_planner_expects(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRAIN_CACHE", "/nonexistent")  # no calibration of this machine
    lines = read_description(RECIPE_DIR / f"{name}.yaml").splitlines()
    [command] = [line.split() for line in lines if "raytrain-hpc plan" in line]
    options = {"--nodes": "nodes", "--workers": "workers", "--device": "device"}
    arguments: dict[str, Any] = {options[a]: b for a, b in zip(command[3::2], command[4::2], strict=True)}
    for key in arguments.keys() - {"device"}:
        arguments[key] = int(arguments[key])
    assert command[2] == name
    assert format_expectation(plan(load_config(name), **arguments)) in lines


def test_schema_of_the_recipes_is_that_of_the_package() -> None:
    schema = json.loads((RECIPE_DIR / "schema.json").read_text())
    assert schema == make_schema(), "run: raytrain-hpc config --schema > conf/schema.json"
    for path in list_recipes().values():
        assert path.read_text().startswith("# yaml-language-server: $schema=schema.json\n")


def test_recipe_is_found_by_name_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("llama3_1b")
    assert config.run.name == "llama3_1b" and config.model.hidden_size == 2048
    assert config.origin("train.seq_len") == "recipe llama3_1b:16"
    (tmp_path / "llama3_1b").mkdir()
    assert load_config("llama3_1b").model.hidden_size == 2048, "a directory is no config"
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "llama3_1b").rmdir()
    (tmp_path / "llama3_1b").write_text("train: {steps: 3}")
    assert load_config("llama3_1b").train.steps == 3, "an existing file wins"
    with pytest.raises(ConfigError, match=r"No such file or recipe; did you mean the recipe llama3_8b\?"):
        load_config("conf/llama3_8b.yaml")
