"""Model code, independent of ranks, process groups and layouts."""
