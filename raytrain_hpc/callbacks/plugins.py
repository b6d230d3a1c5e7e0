"""Callbacks and trackers by name: built-in ones, those that installed packages register, and class paths."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from raytrain_hpc.callbacks.callback import Callback, DriverCallback
from raytrain_hpc.config.field import suggest_name
from raytrain_hpc.config.schema import Config
from raytrain_hpc.errors import CallbackError, ConfigError

CALLBACK_GROUP, TRACKER_GROUP = "raytrain_hpc.callbacks", "raytrain_hpc.trackers"
BUILT_IN = {
    "early_stopping": "raytrain_hpc.callbacks.early_stopping:EarlyStopping",
    "keep_best": "raytrain_hpc.callbacks.keep_best:KeepBest",
    "ema": "raytrain_hpc.callbacks.ema:EMA",
    "memory_snapshot": "raytrain_hpc.callbacks.memory_snapshot:MemorySnapshot",
    "nvtx_ranges": "raytrain_hpc.callbacks.nvtx_ranges:NvtxRanges",
    "garbage_collection": "raytrain_hpc.callbacks.garbage_collection:GarbageCollection",
}


def prepare_callbacks(
    config: Config, callbacks: Iterable[object]
) -> tuple[tuple[Callback, ...], tuple[DriverCallback, ...]]:
    """Return the callbacks of the ranks, copied, and those of the driver: the given ones and those of the config."""
    on_ranks, in_driver = split_callbacks([*callbacks, *create_callbacks(config)])
    return copy_callbacks(on_ranks), in_driver  # copied before the driver gives a callback its control


def create_callbacks(config: Config) -> list[Any]:
    """Return the callbacks that `train.callbacks` names. Raises ConfigError if one does not exist or fails."""
    key, callbacks = "train.callbacks", []
    for setting in config.train.callbacks:
        fail = partial(ConfigError, key, setting.name, config.origin(key))
        factory = _find(setting.name, CALLBACK_GROUP, BUILT_IN, fail)
        try:
            callback = factory(**setting.args)
        except Exception as error:  # of any type: the code is a package's or the user's
            raise fail(f"cannot be created with args={setting.args}: {error}") from error
        if not isinstance(callback, Callback | DriverCallback):
            raise fail(f"gives {type(callback).__name__}, which is neither a Callback nor a DriverCallback")
        callbacks.append(callback)
    return callbacks


def get_tracker_factory(name: str, config: Config) -> Callable[[Config], DriverCallback]:
    """Return the factory of a tracker that a package registers. Raises ConfigError if there is none."""
    key = "logging.trackers"
    factory: Callable[[Config], DriverCallback] = _find(
        name, TRACKER_GROUP, {}, partial(ConfigError, key, name, config.origin(key))
    )
    return factory


def split_callbacks(callbacks: Iterable[object]) -> tuple[tuple[Callback, ...], tuple[DriverCallback, ...]]:
    """Return the callbacks that run on ranks, and those that run in the driver. One object can be both.

    Raises CallbackError for other objects.
    """
    callbacks = tuple(callbacks)
    for callback in callbacks:
        if not isinstance(callback, Callback | DriverCallback):
            kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            remedy = "pass an instance" if isinstance(callback, type) else "derive it from Callback or DriverCallback"
            raise CallbackError(f"callbacks: {kind} is no callback; {remedy}")
    on_ranks = tuple(callback for callback in callbacks if isinstance(callback, Callback))
    return on_ranks, tuple(callback for callback in callbacks if isinstance(callback, DriverCallback))


def copy_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Return copies, as ranks get them. Raises CallbackError for a callback that cannot be copied."""
    copies = []
    for callback in callbacks:
        try:
            copies.append(deepcopy(callback))
        except Exception as error:  # of any type: the code is the user's
            name, reason = type(callback).__name__, f"{type(error).__name__}: {error}"
            remedy = "create such objects in on_generation_start"
            raise CallbackError(f"callback {name}: cannot be copied to the ranks ({reason}); {remedy}") from error
    return tuple(copies)


def _find(name: str, group: str, built_in: dict[str, str], fail: Callable[[str], ConfigError]) -> Callable[..., Any]:
    """Return what is registered under a name, or the object at a path MODULE:NAME."""
    registered = {entry.name: entry for entry in entry_points(group=group)}
    try:
        if name in built_in:
            return _load(built_in[name])
        if name in registered:
            factory: Callable[..., Any] = registered[name].load()
            return factory
        if ":" in name:
            return _load(name)
    except Exception as error:  # of any type: importing runs a package's code
        raise fail(f"cannot be imported: {type(error).__name__}: {error}") from error
    known = [*built_in, *registered]
    suggestion = suggest_name(name, known) if known else "no installed package registers one"
    raise fail(f"no such name; {suggestion}; or give a class as MODULE:NAME")


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    factory: Callable[..., Any] = getattr(import_module(module), name)
    return factory
