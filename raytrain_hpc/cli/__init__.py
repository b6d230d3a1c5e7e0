"""Command line of raytrain-hpc: one file per command, named after the command."""
