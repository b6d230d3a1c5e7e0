"""Loading of a config: defaults, overridden by YAML files (with `base:`), overridden by `key=value` words.

Every invalid setting is a one-line ConfigError with the setting's origin.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from raytrain_hpc.config.init_from import read_model_settings
from raytrain_hpc.config.presets import PRESETS
from raytrain_hpc.config.schema import AUTO, PLANNABLE_KEYS, Config, SourceConfig, StageConfig, to_dict
from raytrain_hpc.config.validation import validate_config
from raytrain_hpc.errors import ConfigError

_TYPE_DESCRIPTIONS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "bool | str": "false, true or elastic",
    "int | str": "a whole number or auto",
    "float | str": "a number or auto",
    "list[int]": "a list of whole numbers, like [0, 1]",
    "list[str]": "a list of words, like [qkv, out]",
    "list[SourceConfig]": "a list of sources, like [{path: DIR, weight: 1}]",
    "list[InjectConfig]": "a list of faults, like [{kind: kill, rank: 1, step: 10}]",
    "list[StageConfig]": "a list of stages, like [{from_tokens: 1000000, weights: [1, 3]}]",
}


class Setting(NamedTuple):
    """A key with its value, and where it was set."""

    key: str
    value: Any
    origin: str


def load_config(
    path: str | Path | None = None, overrides: Sequence[str] = (), *, defaults: Sequence[str] = ()
) -> Config:
    """Load a config. Later layers win: built-in defaults, `defaults`, base files, the YAML file, `overrides`.

    Args:
        path: YAML file. Its `base:` key names a file to load first.
        overrides: `key=value` words.
        defaults: `key=value` words with a lower priority than the file.

    Raises ConfigError with key, value, origin and remedy for an unknown key, a wrong type or an invalid value.
    """
    settings = list(_load_file(Path(path), ())) if path is not None else []
    if path is not None and not any(s.key == "run.name" for s in settings):
        settings.insert(0, Setting("run.name", Path(path).stem, str(path)))
    settings += [_parse_override(word) for word in overrides]
    return build_config([*(_parse_override(word)._replace(origin="") for word in defaults), *settings])


def build_config(settings: list[Setting]) -> Config:
    """Apply settings in order on top of the defaults, resolve references, and validate the result."""
    tree = OmegaConf.structured(Config)
    auto_choices: dict[str, list[Any] | None] = {}
    for setting in _prepend_model_settings(settings):
        if setting.key in PLANNABLE_KEYS:
            auto_choices.pop(setting.key, None)
            if isinstance(setting.value, list) or (setting.value == AUTO and _get_default(setting.key) != AUTO):
                auto_choices[setting.key] = _collect_choices(tree, setting)
                continue
        _apply_setting(tree, setting)
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        # Only ${...} references are resolved this late: report the setting that holds the broken reference.
        source = {s.key: s for s in settings}.get(str(error.full_key), Setting(str(error.full_key), "", ""))
        raise ConfigError(source.key, source.value, source.origin, _get_first_line(error)) from error
    if not isinstance(config, Config):
        raise TypeError("OmegaConf did not return a Config")
    config.__dict__["_origins"] = {s.key: s.origin for s in settings}
    config.__dict__["_auto_choices"] = auto_choices
    validate_config(config)
    config.run.dir = str(Path(config.run.dir).expanduser())
    if config.run.init_from:
        config.run.init_from = str(Path(config.run.init_from).expanduser().absolute())
    return config


def _collect_choices(tree: Any, setting: Setting) -> list[Any] | None:
    """Return the values that the planner may choose from, or None for auto. Sets the first one in the tree.

    Every value is checked like a single value.
    """
    OmegaConf.update(tree, setting.key, _get_default(setting.key))
    if setting.value == AUTO:
        return None
    if not setting.value:
        raise ConfigError(setting.key, "[]", setting.origin, "needs at least one value to choose from")
    for value in [*setting.value, setting.value[0]]:
        _apply_setting(tree, setting._replace(value=value))
        if isinstance(value, int) and value < (low := _find_field(setting.key).metadata["minimum"] or 0):
            raise ConfigError(setting.key, value, setting.origin, f"needs at least {low:g}")
    return list(dict.fromkeys(setting.value))


def _find_field(key: str) -> Any:
    return next(f for f in fields(_get_section_class(key.split(".")[0])) if _is_field_of_key(f.name, key))


def _get_default(key: str) -> Any:
    return _find_field(key).default


def config_to_yaml(config: Config) -> str:
    """Return the resolved config as YAML. `load_config` reads the same values from it."""
    settings = to_dict(config)
    settings["model"]["preset"] = ""
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def get_key_docs() -> dict[str, str]:
    """Return the description of every dotted key."""
    return {
        f"{section.name}.{f.name.rstrip('_')}": f.metadata["doc"]
        for section in fields(Config)
        for f in fields(_get_section_class(section.name))
    }


def _parse_override(override: str) -> Setting:
    name, equals, text = override.partition("=")
    if not equals or not name:
        raise ConfigError(override, "", "command line", "is not a setting; write key=value")
    name = name.strip()
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        if not _is_text_key(name):
            raise ConfigError(name, text, "command line", "not a YAML value; quote it") from error
        value = text
    if _is_text_key(name) and not isinstance(value, str):
        value = text  # YAML reads 2026_11_21 as a number
    return Setting(name, value, "command line")


def _load_file(path: Path, chain: tuple[Path, ...]) -> Iterator[Setting]:
    if path.resolve() in chain:
        raise ConfigError("base", str(path), str(chain[-1]), "base files refer to each other; break the circle")
    try:
        root = yaml.compose(path.read_text())
    except OSError as error:
        raise ConfigError("config", str(path), "", f"cannot be read: {error.strerror}; check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), "", f"not valid YAML: {_describe_yaml_error(error)}") from error
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError("config", str(path), "", "must be a YAML mapping of sections")
    settings = list(_flatten(root, "", path))
    for setting in settings:
        if setting.key == "base":
            yield from _load_file(path.parent / str(setting.value), (*chain, path.resolve()))
    yield from (setting for setting in settings if setting.key != "base")


def _describe_yaml_error(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    location = "" if mark is None else f"line {mark.line + 1}: "
    return location + " ".join(str(getattr(error, "problem", None) or error).split())


def _flatten(node: yaml.MappingNode, prefix: str, path: Path) -> Iterator[Setting]:
    sections = {section.name for section in fields(Config)}
    for key_node, value_node in node.value:
        dotted = f"{prefix}{key_node.value}"
        origin = f"{path}:{key_node.start_mark.line + 1}"
        if dotted in sections and isinstance(value_node, yaml.MappingNode):
            yield from _flatten(value_node, f"{dotted}.", path)
        elif dotted in sections and value_node.tag == "tag:yaml.org,2002:null":
            continue
        elif _is_text_key(dotted) and value_node.tag.rpartition(":")[2] in ("int", "float", "bool", "timestamp"):
            yield Setting(dotted, value_node.value, origin)
        else:
            try:
                value = yaml.SafeLoader("").construct_object(value_node, deep=True)
            except yaml.YAMLError as error:
                raise ConfigError(dotted, value_node.value, origin, "not a plain YAML value; quote it") from error
            yield Setting(dotted, value, origin)


def _prepend_model_settings(settings: list[Setting]) -> list[Setting]:
    """Put the settings of model.preset, then those of run.init_from, before all others.

    Any explicit model key therefore overrides them, whichever file or word sets it.
    """
    init_from = [s for s in settings if s.key == "run.init_from"][-1:]
    for _, directory, origin in (s for s in init_from if s.value):
        model_settings = read_model_settings(str(directory), origin)
        settings = [Setting(f"model.{k}", v, f"{directory}") for k, v in model_settings.items()] + settings
    presets = [s for s in settings if s.key == "model.preset" and s.value]
    if not presets:
        return settings
    name = str(presets[-1].value)
    if name not in PRESETS:
        raise ConfigError("model.preset", name, presets[-1].origin, _suggest(name, list(PRESETS)))
    return [Setting(f"model.{k}", v, f"preset {name}") for k, v in PRESETS[name].items()] + settings


def _apply_setting(tree: Any, setting: Setting) -> None:
    section, _, name = setting.key.partition(".")
    keys = get_key_docs()
    if setting.key not in keys:
        sections = {f.name: f.type for f in fields(Config)}
        if section in sections and not name:
            raise ConfigError(setting.key, setting.value, setting.origin, f"{section} is a section; set {section}.KEY")
        remedy = f"no such key; {_suggest(setting.key, list(keys))}"
        raise ConfigError(setting.key, setting.value, setting.origin, remedy)
    field_name = next(f.name for f in fields(_get_section_class(section)) if f.name.rstrip("_") == name)
    if setting.value is None:
        raise ConfigError(setting.key, setting.value, setting.origin, "has no value")
    try:
        OmegaConf.update(tree, f"{section}.{field_name}", _check_type(setting))
    except OmegaConfBaseException as error:
        hint = _get_first_line(error) if "Did you mean" in str(error) else ""
        remedy = f"needs {_describe_type(_get_type_name(setting))}" + (f"; {hint}" if hint else "")
        raise ConfigError(setting.key, setting.value, setting.origin, remedy) from error


def _get_type_name(setting: Setting) -> str:
    """Return the declared type of a key, as written in schema.py."""
    return str(_find_field(setting.key).type)


def _check_type(setting: Setting) -> Any:
    """Return the value with numbers converted, and refuse conversions that OmegaConf would do silently (true to 1)."""
    type_name = _get_type_name(setting)
    if type_name == "bool | str":
        return setting.value
    if isinstance(setting.value, bool) != (type_name == "bool"):
        raise ConfigError(setting.key, setting.value, setting.origin, f"needs {_describe_type(type_name)}")
    if type_name.endswith("| str") and isinstance(setting.value, str) and setting.value != "auto":
        try:
            return int(setting.value) if "int" in type_name else float(setting.value)
        except ValueError:
            raise ConfigError(
                setting.key, setting.value, setting.origin, f"needs {_describe_type(type_name)}"
            ) from None
    if type_name == "float | str" and isinstance(setting.value, int):
        return float(setting.value)
    return setting.value


def _is_text_key(key: str) -> bool:
    section, _, name = key.partition(".")
    section_fields = fields(_get_section_class(section)) if section in {f.name for f in fields(Config)} else ()
    return any(f.type == "str" and f.name.rstrip("_") == name for f in section_fields)


def _is_field_of_key(field_name: str, key: str) -> bool:
    return field_name.rstrip("_") == key.split(".", 1)[1]


def _describe_type(type_name: str) -> str:
    if type_name.startswith("Literal["):
        return "one of " + ", ".join(type_name[len("Literal[") : -1].replace('"', "").replace("'", "").split(", "))
    return _TYPE_DESCRIPTIONS.get(type_name, f"a value of type {type_name}")


def _get_section_class(section: str) -> Any:
    section_class = next(f for f in fields(Config) if f.name == section).default_factory
    if not is_dataclass(section_class):
        raise TypeError(section)
    return section_class


def _get_first_line(error: Exception) -> str:
    return str(error).splitlines()[0].strip()


def _suggest(word: str, options: list[str]) -> str:
    # After typing errors, the most frequent mistake is the right key in a wrong section ("optim.lr").
    matches = difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    matches = matches or [o for o in options if o.split(".")[-1] == word.split(".")[-1]]
    if matches:
        return f"did you mean {matches[0]}?"
    sections = sorted({o.split(".")[0] for o in options})
    return f"known: {', '.join(sections)}"


__all__ = ["Setting", "SourceConfig", "StageConfig", "build_config", "config_to_yaml", "get_key_docs", "load_config"]
