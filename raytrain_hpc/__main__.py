"""Entry point of `python -m raytrain_hpc`, the `raytrain-hpc` command."""

from raytrain_hpc.cli.main import main

main(prog_name="raytrain-hpc")
