"""`raytrain-hpc recipes`: list and show the recipes that are installed with the package, and the model presets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from raytrain_hpc.cli.options import RECIPE, print_errors_on_one_line
from raytrain_hpc.config.field import suggest_name
from raytrain_hpc.config.presets import PRESET_TRAINING, PRESETS
from raytrain_hpc.config.recipes import list_recipes, read_description
from raytrain_hpc.errors import ConfigError


@click.command()
@click.argument("name", required=False, type=RECIPE)
@print_errors_on_one_line
def recipes(name: str | None) -> None:
    """Print the recipes and model presets, or the recipe NAME. Use it as `raytrain-hpc train NAME`."""
    if name is None:
        for line in _format_list():
            click.echo(line)
        return
    paths = list_recipes()
    if name not in paths:
        raise ConfigError("recipe", name, "command line", f"no such recipe; {suggest_name(name, list(paths))}")
    click.echo(paths[name].read_text(), nl=False)


def format_expectation(plan: dict[str, Any]) -> str:
    """Return the line of a recipe's description with the planner's estimate. `plan`: see `api.plan`."""
    machine, best = plan["machine"], plan["best"]
    device, days = machine["device"], plan["budget"]["days"]
    duration = f"{days:.1f} days" if days >= 2 else f"{24 * days:.1f} hours" if days > 0.1 else f"{1440 * days:.1f} min"
    mfu = "" if device["name"] == "cpu" else f" at {100 * best['mfu']:.0f}% MFU"
    return (
        f"Expected on {plan['workers']} x {device['name']}: {plan['budget']['tokens']:.3g} tokens in {duration}{mfu}, "
        f"{best['memory_gib']:.2g} of {device['memory_gib']:g} GiB each (planner's estimate)"
    )


def _format_list() -> Iterator[str]:
    """Yield the recipes with the first sentence and the expectation of each, then the presets."""
    yield "Recipes: raytrain-hpc train NAME [key=value ...]; raytrain-hpc recipes NAME prints the file.\n"
    for name, path in list_recipes().items():
        lines = read_description(path).splitlines()
        summary = " ".join(lines[: lines.index("")]) if "" in lines else " ".join(lines)
        yield f"  {name:<22}{summary}"
        yield from (f"  {'':<22}{line}" for line in lines if line.startswith("Expected on "))
    yield "\nPresets: model.preset=NAME brings the model, and these defaults:\n"
    for name in PRESETS:
        yield f"  {name:<22}{', '.join(f'{key}={value}' for key, value in PRESET_TRAINING[name].items())}"
