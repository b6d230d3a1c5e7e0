"""Observability of a run: metric keys, console, metric files, experiment trackers and profiler."""
