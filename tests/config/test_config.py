"""Loading and validating a config: documentation of keys, order of layers, round trip through YAML, errors."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from raytrain_hpc.api import load_config, plan
from raytrain_hpc.config.loader import config_to_yaml, get_key_docs
from raytrain_hpc.config.presets import PRESETS
from raytrain_hpc.config.schema import SECTIONS, to_dict
from raytrain_hpc.errors import ConfigError

CONF = Path(__file__).parents[2] / "conf"
RECIPES = sorted(CONF.glob("*.yaml"))
# name -> (workers, published number of parameters)
PARAMETERS = {
    "gpt2_124m": (8, 124_439_808),
    "llama3_1b": (8, 1_235_814_400),
    "llama3_8b": (64, 8_030_261_248),
    "llama3_70b": (256, 70_553_706_496),
}


def expect_config_error(*words: str, path: Path | None = None) -> ConfigError:
    """Return the ConfigError that loading raises, after checking that it is one line."""
    with pytest.raises(ConfigError) as error_info:
        load_config(path, words)
    assert "\n" not in str(error_info.value)
    return error_info.value


def write_yaml(directory: Path, text: str, name: str = "a.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_every_key_is_documented() -> None:
    keys = get_key_docs()
    count = sum(len(fields(section)) for section in SECTIONS.values())
    assert len(keys) == count
    for key, doc in keys.items():
        assert doc.endswith(".") and len(doc) > 10, key


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_loads_and_can_be_planned(path: Path) -> None:
    config = load_config(path)
    assert config.run.name == path.stem
    assert config.run.dir == f"runs/{path.stem}"
    assert path.read_text().startswith("# ")
    result = plan(config)
    assert result["workers"] == result["layout"]["dp_replicate"] * result["layout"]["dp_shard"]


@pytest.mark.parametrize("name", PARAMETERS)
def test_recipe_has_the_published_parameter_count_and_fits_its_cluster(name: str) -> None:
    workers, parameters = PARAMETERS[name]
    result = plan(load_config(CONF / f"{name}.yaml"), workers=workers)
    assert result["parameters"] == parameters
    assert result["state_bytes_per_rank"] < 20 * 2**30


def test_quickstart_equals_the_defaults() -> None:
    assert load_config(CONF / "quickstart.yaml") == load_config(None)


def test_overrides_win_over_file_and_file_over_base(tmp_path: Path) -> None:
    write_yaml(tmp_path, "train: {steps: 1, seq_len: 7}\noptimizer: {lr: 0.1}\nrun: {seed: 1}", "root.yaml")
    write_yaml(tmp_path, "base: root.yaml\ntrain: {steps: 2}\noptimizer: {lr: 0.2}", "middle.yaml")
    top = write_yaml(tmp_path, "train: {steps: 3}\nbase: middle.yaml", "top.yaml")  # `base` may come last
    config = load_config(top, ["run.seed=4", "run.seed=5"])
    assert (config.train.seq_len, config.optimizer.lr, config.train.steps, config.run.seed) == (7, 0.2, 3, 5)
    assert config.run.name == "top"
    assert config.origin("train.seq_len") == f"{tmp_path}/root.yaml:1"
    assert config.origin("train.steps") == f"{top}:1"
    assert config.origin("run.seed") == "load_config"
    assert config.origin("data.path") == ""


def test_circular_base_files_are_refused(tmp_path: Path) -> None:
    write_yaml(tmp_path, "base: b.yaml", "a.yaml")
    error = expect_config_error(path=write_yaml(tmp_path, "base: a.yaml", "b.yaml"))
    assert "circle" in str(error)


@pytest.mark.parametrize("key_first", [True, False])
def test_explicit_key_overrides_the_preset_in_any_order(key_first: bool) -> None:
    words = ["model.num_layers=3", "model.preset=llama3_8b"]
    model = load_config(None, words if key_first else words[::-1]).model
    assert (model.num_layers, model.hidden_size) == (3, PRESETS["llama3_8b"]["hidden_size"])


def test_key_in_a_base_file_overrides_the_preset(tmp_path: Path) -> None:
    write_yaml(tmp_path, "model: {hidden_size: 512}", "base.yaml")
    top = write_yaml(tmp_path, "base: base.yaml\nmodel: {preset: gpt2_124m, num_heads: 8}", "top.yaml")
    model = load_config(top, ["model.num_layers=2"]).model
    assert (model.hidden_size, model.num_heads, model.num_layers, model.norm) == (512, 8, 2, "layernorm")


@pytest.mark.parametrize("name", PRESETS)
def test_preset_sets_all_its_keys(name: str) -> None:
    model = to_dict(load_config(None, [f"model.preset={name}"]).model)
    assert {key: model[key] for key in PRESETS[name]} == PRESETS[name]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["model.preset=gpt2_124m", "model.num_layers=2"],
        ["checkpoint.async=false", "checkpoint.interval=7"],
        ["optimizer.lr=1e-7", "lr_scheduler.min_lr=1e-8", "optimizer.eps=1e-12"],
        ["train.steps=3"],  # fewer than the default warmup
        ["data.sources=[{path: a, weight: 2}, {path: b}]"],
        ["run.dir=~/a b: #ü", "run.name=yes", "profiler.ranks=[0, 3]"],
        ["parallel.zero=3", "parallel.dp_shard=2", "cluster.workers=4", "fault.stall_timeout=1.5"],
    ],
    ids=lambda words: " ".join(words) or "defaults",
)
def test_config_round_trips_through_yaml(tmp_path: Path, words: list[str]) -> None:
    config = load_config(None, words)
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    config.model.preset = ""  # the YAML holds the keys of the preset instead
    again = load_config(tmp_path / "config.yaml")
    assert again == config
    (tmp_path / "again.yaml").write_text(config_to_yaml(again))
    assert (tmp_path / "again.yaml").read_text() == (tmp_path / "config.yaml").read_text()


@pytest.mark.parametrize("name", ["007", "2026_11_21", "2026-11-21", "1e3", "yes", "a: b", "[x"])
def test_text_values_are_not_converted(tmp_path: Path, name: str) -> None:
    assert load_config(None, [f"run.name={name}"]).run.dir == f"runs/{name}"
    yaml_text = name if name not in ("a: b", "[x") else f"'{name}'"
    assert load_config(write_yaml(tmp_path, f"run:\n  name: {yaml_text}")).run.name == name


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("exp #1", "exp #1"),
        ("'exp #1'", "exp #1"),
        ('"a\\tb"', "a\tb"),
        ("'a' #1", "a"),
        ("'a' b", "'a' b"),
        ("''", ""),
    ],
)
def test_text_of_a_word_is_whole_unless_it_is_quoted(word: str, value: str) -> None:
    assert load_config(None, [f"logging.wandb_project={word}"]).logging.wandb_project == value


def test_python_keyword_key_is_written_without_underscore() -> None:
    assert load_config(None, ["checkpoint.async=false"]).checkpoint.async_ is False
    assert "checkpoint.async" in get_key_docs()
    assert "did you mean checkpoint.async?" in str(expect_config_error("checkpoint.async_=false"))


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("train.stepz=1", "did you mean train.steps?"),
        ("optim.lr=1", "did you mean optimizer.lr?"),
        ("quux.zyzzyx=1", "known sections: run, model, data"),
        ("train=1", "train is a section; set train.KEY"),
        ("model.preset=llama3_9b", "did you mean llama3_8b?"),
        ("train.steps=true", "needs a whole number"),
        ("train.steps=1.5", "train.steps"),
        ("train.compile=1", "needs true, false or auto"),
        ("train.dtype=fp8", "train.dtype"),
        ("optimizer.lr=nan", "needs a finite number"),
        ("optimizer.lr=0", "needs more than 0"),
        ("train.steps=-1", "needs at least 0"),
        ("train.steps=", "train.steps"),
        ("train.micro_batch_size=5", "must divide train.global_batch_size=32; 4 would"),
        ("train.micro_batch_size=many", "needs a whole number or auto"),
        ("lr_scheduler.min_lr=1", "must not exceed optimizer.lr=0.003"),
        ("lr_scheduler.warmup_steps=501", "must not exceed train.steps=150"),
        ("lr_scheduler.batch_scaling=sqrt", "needs the global batch size at which optimizer.lr was tuned"),
        ("model.num_heads=5", "must divide model.hidden_size=128"),
        ("model.dropout=1", "below 1"),
        ("parallel.zero=4", "must be one of the stages 0, 1, 2 and 3"),
        ("run.dir=", "needs a directory"),
        ("run.dir=~nobody-here/a", "~nobody-here is no user with a home directory"),
        ("run.init_from=~nobody-here/a", "~nobody-here is no user with a home directory"),
        ("profiler.steps=[3, 3]", "first < end"),
        ("checkpoint.local_dir=nvme/checkpoints", "needs an absolute path; it may begin with ~ or $VARIABLE"),
        ("checkpoint.local_keep=0", "needs at least 1"),
        ("checkpoint.upload_interval=20", "needs checkpoint.local_dir, which holds the checkpoints in between"),
    ],
)
def test_invalid_setting_is_a_one_line_error_with_key_origin_and_remedy(word: str, remedy: str) -> None:
    error = expect_config_error(word)
    assert remedy in str(error)
    assert str(error).startswith(word.split("=")[0].split(".")[0])
    assert "(load_config)" in str(error) or error.key in ("lr_scheduler.base_batch_size",)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "fault.inject=[{kind: nan}, {kind: kill, rank: -1}]",
            "fault.inject[1].rank=-1 (load_config): needs at least 0",
        ),
        ("fault.inject=[{kind: nan, step: 0}]", "fault.inject[0].step=0 (load_config): needs at least 1"),
        ("fault.inject=[{kind: bitflip, bit: -3}]", "fault.inject[0].bit=-3 (load_config): needs at least 0"),
        ("data.sources=[{path: a, weight: -1}]", "data.sources[0].weight=-1.0 (load_config): needs at least 0"),
        ("data.sources=[{path: a, weight: .inf}]", "data.sources[0].weight=inf (load_config): needs a finite number"),
        ("data.stages=[{from_tokens: 0}]", "data.stages[0].from_tokens=0 (load_config): needs more than 0"),
    ],
)
def test_a_number_out_of_bounds_in_a_list_is_named(word: str, message: str) -> None:
    assert str(expect_config_error(word)) == message


def test_path_together_with_sources_is_refused() -> None:
    assert "not both" in str(expect_config_error("data.path=x", "data.sources=[{path: a}]"))
    assert load_config(None, ["data.path=stdlib", "data.sources=[{path: a}]"]).data.sources[0].path == "a"


@pytest.mark.parametrize("text", ["- 1", "a: [", "train: {steps: [1]}", "train: {steps: }"])
def test_invalid_file_is_named_in_the_error(tmp_path: Path, text: str) -> None:
    path = write_yaml(tmp_path, text)
    assert str(path) in str(expect_config_error(path=path))


def test_missing_file_is_named_in_the_error(tmp_path: Path) -> None:
    assert "none.yaml" in str(expect_config_error(path=tmp_path / "none.yaml"))


@pytest.mark.parametrize(
    ("interval", "remedy"),
    [
        ("auto", "needs checkpoint.interval as a number of steps that divides it, not auto; or set this to auto"),
        ("0", "needs checkpoint.interval as a number of steps that divides it, not 0"),
        ("8", "must be a multiple of checkpoint.interval=8; 24 would"),
    ],
)
def test_an_upload_interval_is_a_multiple_of_the_interval(interval: str, remedy: str) -> None:
    words = ["checkpoint.local_dir=$DISK", "checkpoint.upload_interval=20", f"checkpoint.interval={interval}"]
    assert remedy in str(expect_config_error(*words))
    assert load_config(None, [*words, "checkpoint.interval=10"]).checkpoint.publish_interval == 20
