"""raytrain_hpc: train language models on a Ray cluster that changes under you."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_hpc.api import Run, run_script, start, train
    from raytrain_hpc.config.loader import load_config
    from raytrain_hpc.config.schema import Config
    from raytrain_hpc.data.preprocess.prepare import prepare
    from raytrain_hpc.driver.result import Result
    from raytrain_hpc.errors import RaytrainError
    from raytrain_hpc.huggingface.exporter import export_model
    from raytrain_hpc.huggingface.importer import import_model
    from raytrain_hpc.run_report.writer import write_report
    from raytrain_hpc.script import attach
    from raytrain_hpc.text_generation import generate

# Resolved on first use, so that `raytrain-hpc plan` loads neither torch nor Ray. The planner itself is
# `raytrain_hpc.api.plan`: the name `raytrain_hpc.plan` belongs to the room of that name.
_HOMES = {
    "Config": "config.schema",
    "RaytrainError": "errors",
    "Result": "driver.result",
    "Run": "api",
    "attach": "script",
    "export_model": "huggingface.exporter",
    "generate": "text_generation",
    "import_model": "huggingface.importer",
    "load_config": "config.loader",
    "prepare": "data.preprocess.prepare",
    "run_script": "api",
    "start": "api",
    "train": "api",
    "write_report": "run_report.writer",
}

__all__ = [
    "Config",
    "RaytrainError",
    "Result",
    "Run",
    "attach",
    "export_model",
    "generate",
    "import_model",
    "load_config",
    "prepare",
    "run_script",
    "start",
    "train",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
