"""Sweeps: the parameters to vary, the search over them, the processes of the trials, and their comparison."""
