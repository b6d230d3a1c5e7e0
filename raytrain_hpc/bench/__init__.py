"""Benchmarks, most of them against a baseline. `raytrain-hpc bench NAME` calls `run` of the module NAME."""

BENCHMARKS = (
    "step",
    "startup",
    "checkpoint",
    "prepare",
    "data",
    "overhead",
    "recovery",
    "command_line",
    "comm",
    "device",
    "snapshots",
)
