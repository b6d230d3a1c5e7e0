"""`raytrain-hpc report`: write an HTML page about one or several runs."""

from __future__ import annotations

import click

from raytrain_hpc.cli.options import print_errors_on_one_line


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, metavar="RUN_DIR...")
@click.option("--out", help="File to write.  [default: report.html in the run's directory]")
@print_errors_on_one_line
def report(run_dirs: tuple[str, ...], out: str | None) -> None:
    """Write one HTML page about one run, or comparing several: curves, incidents, memory, time."""
    from raytrain_hpc.run_report.writer import report as write_report

    click.echo(f"{write_report(run_dirs, out)}")
