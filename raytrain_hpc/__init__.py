"""raytrain_hpc: fault-tolerant, elastic LLM training on Ray."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raytrain_hpc.api import Run, plan, run_script, start, train
    from raytrain_hpc.callbacks.callback import Callback, DriverCallback, ParameterState
    from raytrain_hpc.callbacks.early_stopping import EarlyStopping
    from raytrain_hpc.callbacks.ema import EMA
    from raytrain_hpc.callbacks.garbage_collection import GarbageCollection
    from raytrain_hpc.callbacks.keep_best import KeepBest
    from raytrain_hpc.callbacks.memory_snapshot import MemorySnapshot
    from raytrain_hpc.callbacks.nvtx_ranges import NvtxRanges
    from raytrain_hpc.checkpoint_weights import load_weights
    from raytrain_hpc.config.loader import load_config
    from raytrain_hpc.config.schema import Config
    from raytrain_hpc.data.preprocess.prepare import prepare
    from raytrain_hpc.dcp.dcp_importer import import_dcp
    from raytrain_hpc.driver.result import Result
    from raytrain_hpc.errors import (
        CallbackError,
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
    from raytrain_hpc.sweeps.sweep import sweep
    from raytrain_hpc.sweeps.sweep_result import SweepResult
    from raytrain_hpc.sweeps.trial import Trial
    from raytrain_hpc.text_generation import generate

    __version__: str

# Module of each public name. Names are imported on first use, so that `raytrain-hpc plan` loads neither torch nor Ray.
_MODULES = {
    "Callback": "callbacks.callback",
    "CallbackError": "errors",
    "CheckpointCorruptedError": "errors",
    "CheckpointError": "errors",
    "ClusterError": "errors",
    "Config": "config.schema",
    "ConfigError": "errors",
    "DataError": "errors",
    "DriverCallback": "callbacks.callback",
    "EMA": "callbacks.ema",
    "EarlyStopping": "callbacks.early_stopping",
    "GarbageCollection": "callbacks.garbage_collection",
    "KeepBest": "callbacks.keep_best",
    "LayoutError": "errors",
    "LeaseLostError": "errors",
    "MemorySnapshot": "callbacks.memory_snapshot",
    "MissingDependencyError": "errors",
    "ModelError": "errors",
    "NvtxRanges": "callbacks.nvtx_ranges",
    "OffloadError": "errors",
    "ParameterState": "callbacks.callback",
    "RaytrainError": "errors",
    "Result": "driver.result",
    "Run": "api",
    "RunDirectoryError": "errors",
    "RunFailedError": "errors",
    "ScriptRun": "script",
    "StateLostError": "errors",
    "SweepResult": "sweeps.sweep_result",
    "Trial": "sweeps.trial",
    "WorkerFailedError": "errors",
    "attach": "script",
    "export_model": "huggingface.exporter",
    "generate": "text_generation",
    "import_dcp": "dcp.dcp_importer",
    "import_model": "huggingface.importer",
    "load_config": "config.loader",
    "load_weights": "checkpoint_weights",
    "plan": "api",
    "prepare": "data.preprocess.prepare",
    "report": "run_report.writer",
    "run_script": "api",
    "start": "api",
    "sweep": "sweeps.sweep",
    "train": "api",
}

__all__ = [
    "Callback",
    "CallbackError",
    "CheckpointCorruptedError",
    "CheckpointError",
    "ClusterError",
    "Config",
    "ConfigError",
    "DataError",
    "DriverCallback",
    "EMA",
    "EarlyStopping",
    "GarbageCollection",
    "KeepBest",
    "LayoutError",
    "LeaseLostError",
    "MemorySnapshot",
    "MissingDependencyError",
    "ModelError",
    "NvtxRanges",
    "OffloadError",
    "ParameterState",
    "RaytrainError",
    "Result",
    "Run",
    "RunDirectoryError",
    "RunFailedError",
    "ScriptRun",
    "StateLostError",
    "SweepResult",
    "Trial",
    "WorkerFailedError",
    "__version__",
    "attach",
    "export_model",
    "generate",
    "import_dcp",
    "import_model",
    "load_config",
    "load_weights",
    "plan",
    "prepare",
    "report",
    "run_script",
    "start",
    "sweep",
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
