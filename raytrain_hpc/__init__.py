"""raytrain_hpc: fault-tolerant, elastic LLM training on Ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_hpc.api import Run, plan, run_script, start, train
    from raytrain_hpc.config.loader import load_config
    from raytrain_hpc.config.schema import Config
    from raytrain_hpc.data.preprocess.prepare import prepare
    from raytrain_hpc.driver.result import Result
    from raytrain_hpc.errors import (
        CheckpointCorruptedError,
        CheckpointError,
        ClusterError,
        ConfigError,
        DataError,
        LayoutError,
        LeaseLostError,
        MissingDependencyError,
        ModelError,
        OffloadError,
        RaytrainError,
        RunDirectoryError,
        RunFailedError,
        StateLostError,
        WorkerFailedError,
    )
    from raytrain_hpc.huggingface.exporter import export_model
    from raytrain_hpc.huggingface.importer import import_model
    from raytrain_hpc.run_report.writer import report
    from raytrain_hpc.script import ScriptRun, attach
    from raytrain_hpc.text_generation import generate

    __version__: str

# Module of each public name. Names are imported on first use, so that `raytrain-hpc plan` loads neither torch nor Ray.
_MODULES = {
    "CheckpointCorruptedError": "errors",
    "CheckpointError": "errors",
    "ClusterError": "errors",
    "Config": "config.schema",
    "ConfigError": "errors",
    "DataError": "errors",
    "LayoutError": "errors",
    "LeaseLostError": "errors",
    "MissingDependencyError": "errors",
    "ModelError": "errors",
    "OffloadError": "errors",
    "RaytrainError": "errors",
    "Result": "driver.result",
    "Run": "api",
    "RunDirectoryError": "errors",
    "RunFailedError": "errors",
    "ScriptRun": "script",
    "StateLostError": "errors",
    "WorkerFailedError": "errors",
    "attach": "script",
    "export_model": "huggingface.exporter",
    "generate": "text_generation",
    "import_model": "huggingface.importer",
    "load_config": "config.loader",
    "plan": "api",
    "prepare": "data.preprocess.prepare",
    "report": "run_report.writer",
    "run_script": "api",
    "start": "api",
    "train": "api",
}

__all__ = [
    "CheckpointCorruptedError",
    "CheckpointError",
    "ClusterError",
    "Config",
    "ConfigError",
    "DataError",
    "LayoutError",
    "LeaseLostError",
    "MissingDependencyError",
    "ModelError",
    "OffloadError",
    "RaytrainError",
    "Result",
    "Run",
    "RunDirectoryError",
    "RunFailedError",
    "ScriptRun",
    "StateLostError",
    "WorkerFailedError",
    "__version__",
    "attach",
    "export_model",
    "generate",
    "import_model",
    "load_config",
    "plan",
    "prepare",
    "report",
    "run_script",
    "start",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("raytrain-hpc")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
