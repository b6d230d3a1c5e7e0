"""Benchmarks that alternate between the platform and a peer. `raytrain-hpc bench NAME` calls `run` of module NAME."""

BENCHMARKS = (
    "step",
    "startup",
    "checkpoint",
    "prepare",
    "data",
    "overhead",
    "recovery",
    "comm",
    "device",
    "snapshots",
)
