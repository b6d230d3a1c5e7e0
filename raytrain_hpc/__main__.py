"""`python -m raytrain_hpc` is the `raytrain-hpc` command."""

from raytrain_hpc.cli.main import main

main(prog_name="raytrain-hpc")
