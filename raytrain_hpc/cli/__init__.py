"""The command line: one file per command of raytrain-hpc, by the name of the command."""
