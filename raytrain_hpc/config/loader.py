"""Loading of a config: defaults, overridden by YAML files (with `base:`), overridden by `key=value` words.

Every invalid setting is a one-line ConfigError with the setting's origin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from raytrain_hpc.config.aliases import suggest_key
from raytrain_hpc.config.field import suggest_name
from raytrain_hpc.config.init_from import INIT_FROM_KEY, find_model_source, read_model_settings
from raytrain_hpc.config.presets import PRESET_TRAINING, PRESETS
from raytrain_hpc.config.recipes import find_recipe
from raytrain_hpc.config.schema import AUTO, PLANNABLE_KEYS, SECTIONS, Config, get_default, get_fields, to_dict
from raytrain_hpc.config.validation import validate_config
from raytrain_hpc.config.value_types import convert_value, get_type
from raytrain_hpc.config.yaml_file import TEXT_KEYS, Setting, check_text, read_yaml_file
from raytrain_hpc.errors import ConfigError
from raytrain_hpc.storage.location import is_url, make_absolute

Settings = Sequence[str] | Mapping[str, Any]


def load_config(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Settings = (), *, defaults: Sequence[str] = ()
) -> Config:
    """Load a config. Later layers win: built-in defaults, `defaults`, base files, `source`, `overrides`.

    Args:
        source: YAML file, the name of a recipe (`raytrain-hpc recipes`), or settings as a dict, nested
            ({"train": {"steps": 5}}) or with dotted keys ({"train.steps": 5}). The `base:` key of a file names a file
            to load first.
        overrides: `key=value` words, or settings as a dict.
        defaults: `key=value` words with a lower priority than the source.

    Raises ConfigError with key, value, origin and remedy for an unknown key, a wrong type or an invalid value.
    """
    if isinstance(overrides, Mapping):
        given = list(_read_dict(overrides))
    else:
        given = [parse_override(word, "load_config") for word in _check_words("overrides", overrides)]
    words = [parse_override(word)._replace(origin="") for word in _check_words("defaults", defaults)]
    return build_config([*words, *_read_source(source), *given])


def load_command_line(source: str | None, words: Sequence[str], *, defaults: Sequence[str] = ()) -> Config:
    """Load a config as `load_config` does. Errors say that `words` were given on the command line."""
    given = [parse_override(word) for word in words]
    return build_config(
        [*(parse_override(word)._replace(origin="") for word in defaults), *_read_source(source), *given]
    )


def copy_config(config: Config) -> Config:
    """Return a copy of a config. Raises ConfigError if the argument is something else, such as the name of a recipe."""
    _check_config(config)
    return deepcopy(config)


def build_config(settings: list[Setting]) -> Config:
    """Apply settings in order on top of the defaults, resolve references, and validate the result."""
    given, preset = tuple(settings), _list_preset_settings(settings)
    settings = [*preset, *given]
    values, auto_choices = _collect_values(settings)
    if values[INIT_FROM_KEY]:
        settings = [*preset, *_list_init_settings(values, given), *given]
        values, auto_choices = _collect_values(settings)
    sources = {setting.key: setting for setting in settings}
    sections = {
        name: section(**{f.name: values[f"{name}.{f.name.rstrip('_')}"] for f in section.__dataclass_fields__.values()})
        for name, section in SECTIONS.items()
    }
    origins = {key: setting.origin for key, setting in sources.items()}
    config = Config(**sections, origins=origins, auto_choices=auto_choices, settings=given)  # type: ignore[arg-type]
    complete_config(config)
    return config


def _collect_values(settings: Sequence[Setting]) -> tuple[dict[str, Any], dict[str, list[Any] | None]]:
    """Return the value of every key, with references resolved, and the choices that are left to the planner."""
    values = {key: get_default(key) for key in get_fields()}
    auto_choices: dict[str, list[Any] | None] = {}
    for setting in settings:
        _check_key(setting)
        if setting.key in PLANNABLE_KEYS:
            auto_choices.pop(setting.key, None)
            if isinstance(setting.value, list) or (setting.value == AUTO and values[setting.key] != AUTO):
                auto_choices[setting.key] = _collect_choices(setting)
                values[setting.key] = (auto_choices[setting.key] or [get_default(setting.key)])[0]
                continue
        values[setting.key] = setting.value if _has_reference(setting.value) else _convert(setting)
    if any(_has_reference(value) for value in values.values()):
        _resolve_references(values, {setting.key: setting for setting in settings})
    return values, auto_choices


def list_settings(config: Config) -> list[Setting]:
    """Return settings from which `build_config` builds `config` again: those it was built from, then changed values.

    With further settings appended, presets and references are resolved anew. Raises ConfigError for an invalid config.
    """
    complete_config(config)
    built = build_config(list(config.settings))
    changed: list[Setting] = []
    for key, f in get_fields().items():
        value, built_value = (getattr(getattr(each, key.partition(".")[0]), f.name) for each in (config, built))
        if value != built_value:
            changed.append(Setting(key, to_dict(value), config.origin(key)))
    return [*config.settings, *changed]


def complete_config(config: Config) -> None:
    """Validate a config, convert its values, fill in run.dir. Call before a config changed or made by hand is used.

    Raises ConfigError.
    """
    _check_config(config)
    validate_config(config)
    for key, f in get_fields().items():  # also what was assigned to attributes: the run's config.yaml has plain values
        section = getattr(config, key.partition(".")[0])
        setattr(section, f.name, convert_value(getattr(section, f.name), get_type(key)))
    config.run.dir = _complete_run_dir(config.run.dir, config.run.name)
    if config.run.init_from:
        config.run.init_from = make_absolute(config.run.init_from)


def _check_config(config: object) -> None:
    if not isinstance(config, Config):
        source = repr(config) if isinstance(config, str | Mapping) else "..."
        raise ConfigError("config", config, "", f"is not a Config; pass load_config({source})")


def _check_words(name: str, words: object) -> Sequence[str]:
    """Return a list of `key=value` words. Raises ConfigError for a single text, and for words of other types."""
    if isinstance(words, str):
        raise ConfigError(name, words, "load_config", f"needs a list of key=value words; write [{words!r}]")
    if not isinstance(words, Iterable):
        raise ConfigError(name, words, "load_config", 'needs a list of key=value words, such as ["train.steps=10"]')
    for word in (given := list(words)):
        if not isinstance(word, str):
            raise ConfigError(name, word, "load_config", 'is not a key=value word; write "key=value"')
    return given


def _complete_run_dir(run_dir: str, name: str) -> str:
    run_dir = f"runs/{name}" if run_dir == AUTO else run_dir
    return run_dir.rstrip("/") if is_url(run_dir) else str(Path(run_dir).expanduser())


def config_to_yaml(config: Config) -> str:
    """Return the resolved config as YAML. `load_config` reads the same values from it."""
    settings = to_dict(config)
    settings["model"]["preset"] = ""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def get_key_docs() -> dict[str, str]:
    """Return the description of every dotted key."""
    return {key: f.metadata["doc"] for key, f in get_fields().items()}


def _read_source(source: str | Path | Mapping[str, Any] | None) -> Iterator[Setting]:
    """Yield the settings of a file, recipe or dict. A file or recipe that sets no run.name gives its own name."""
    if source is None:
        return
    if isinstance(source, Mapping):
        yield from _read_dict(source)
        return
    if not isinstance(source, str | Path):
        remedy = "needs a file, the name of a recipe or a dict; pass words as load_config(None, words)"
        raise ConfigError("source", source, "load_config", remedy)
    path, name = find_recipe(source)
    settings = list(read_yaml_file(path, name))
    if not any(setting.key == "run.name" for setting in settings):
        yield Setting("run.name", path.stem, name)
    yield from settings


def _read_dict(settings: Mapping[str, Any]) -> Iterator[Setting]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and "." not in key:
            yield from (Setting(f"{key}.{name}", item, "dict") for name, item in value.items())
        else:
            yield Setting(str(key), value, "dict")


def parse_override(override: str, origin: str = "command line") -> Setting:
    """Return the setting of a `key=value` word. Raises ConfigError for another form, or if the value is no YAML."""
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(override, "", origin, f"is not a setting; write {name or 'key'}=VALUE")
    name = name.strip()
    if name in TEXT_KEYS:
        return Setting(name, _parse_text(name, text.strip(), origin), origin)
    try:
        value = yaml.safe_load(text) if text else ""
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        raise ConfigError(name, text, origin, "not a YAML value; quote it") from error
    return Setting(name, value, origin)


def _parse_text(key: str, text: str, origin: str) -> str:
    """Return the value of a text key: the text itself, since YAML reads "exp #1" as "exp", or what its quotes hold."""
    if text.startswith(("'", '"')):
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            return text  # quotes are a part of it
        return value if isinstance(value, str) else text
    check_text(key, text, origin)
    return text


def _list_preset_settings(settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings of model.preset. Any explicit key overrides them, whichever file or word sets it."""
    presets = [s for s in settings if s.key == "model.preset" and s.value]
    if not presets:
        return []
    name = str(presets[-1].value)
    if name not in PRESETS:
        raise ConfigError("model.preset", name, presets[-1].origin, suggest_name(name, list(PRESETS)))
    preset = {f"model.{key}": value for key, value in PRESETS[name].items()} | PRESET_TRAINING[name]
    return [Setting(key, value, f"preset {name}") for key, value in preset.items()]


def _list_init_settings(values: Mapping[str, Any], settings: Sequence[Setting]) -> list[Setting]:
    """Return the settings of the model that run.init_from names, for keys that are not explicit."""
    (origin,) = [s.origin for s in settings if s.key == INIT_FROM_KEY][-1:]
    run_dir = _complete_run_dir(values["run.dir"], values["run.name"])
    source = find_model_source(values[INIT_FROM_KEY], run_dir)
    return [Setting(f"model.{key}", value, source) for key, value in read_model_settings(source, origin).items()]


def _check_key(setting: Setting) -> None:
    """Raise ConfigError if there is no such key, or if it has no value."""
    if setting.key in SECTIONS:
        remedy = f"{setting.key} is a section; set {setting.key}.KEY"
        raise ConfigError(setting.key, setting.value, setting.origin, remedy)
    if setting.key not in get_fields():
        remedy = f"no such key; {suggest_key(setting.key)}"
        raise ConfigError(setting.key, setting.value, setting.origin, remedy)
    if setting.value is None:
        raise ConfigError(setting.key, setting.value, setting.origin, "has no value")


def _convert(setting: Setting) -> Any:
    try:
        return convert_value(setting.value, get_type(setting.key))
    except ValueError as error:
        raise ConfigError(setting.key, setting.value, setting.origin, str(error)) from error


def _collect_choices(setting: Setting) -> list[Any] | None:
    """Return the values that the planner may choose from, each converted like a single value, or None for auto."""
    if setting.value == AUTO:
        return None
    if not setting.value:
        raise ConfigError(setting.key, "[]", setting.origin, "needs at least one value to choose from")
    choices = [_convert(setting._replace(value=value)) for value in setting.value]
    minimum = get_fields()[setting.key].metadata["minimum"] or 0
    for value in choices:
        if isinstance(value, int) and value < minimum:
            raise ConfigError(setting.key, value, setting.origin, f"needs at least {minimum:g}")
    return list(dict.fromkeys(choices))


def _has_reference(value: Any) -> bool:
    """Return whether a value contains a reference such as ${run.name} or ${oc.env:HOME}."""
    return "${" in (value if isinstance(value, str) else str(value) if isinstance(value, list) else "")


def _resolve_references(values: dict[str, Any], sources: Mapping[str, Setting]) -> None:
    """Replace references to other keys and to the environment (OmegaConf's syntax) in `values`, in place."""
    from omegaconf import OmegaConf  # slow to import, and few configs have references
    from omegaconf.errors import OmegaConfBaseException

    tree: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        tree[section][name] = [to_dict(item) for item in value] if isinstance(value, list) else value
    try:
        resolved: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        source = sources.get(str(error.full_key), Setting(str(error.full_key), "", ""))
        raise ConfigError(source.key, source.value, source.origin, str(error).splitlines()[0].strip()) from error
    for key, value in values.items():
        if _has_reference(value):
            section, _, name = key.partition(".")
            source = sources[key]._replace(value=resolved[section][name])
            values[key] = _convert(source)


__all__ = [
    "Setting",
    "build_config",
    "complete_config",
    "config_to_yaml",
    "copy_config",
    "get_key_docs",
    "list_settings",
    "load_command_line",
    "load_config",
    "parse_override",
]
