"""Recipes: complete configurations of known runs, in conf/."""

from __future__ import annotations

import difflib
from pathlib import Path

from raytrain_hpc.config.schema import get_fields
from raytrain_hpc.errors import ConfigError

# Installed as package data; in a checkout, a link to conf/ at the top level.
RECIPE_DIR = Path(__file__).parents[1] / "conf"


def list_recipes() -> dict[str, Path]:
    """Return the recipes by name, in alphabetical order."""
    return {path.stem: path for path in sorted(RECIPE_DIR.glob("*.yaml"))}


def find_recipe(source: str | Path) -> tuple[Path, str]:
    """Return the YAML file that `source` names, by its path or as a recipe, and its name for messages.

    An existing file wins over a recipe of the same name, a directory does not. Raises ConfigError if there is neither,
    and for a key.
    """
    path, recipes = Path(source), list_recipes()
    if path.exists() and not (path.is_dir() and str(source) in recipes):
        return path, str(path)
    if str(source) in get_fields():
        raise ConfigError(str(source), "", "", f"has no value; write {source}=VALUE")
    if str(source) in recipes:
        return recipes[str(source)], f"recipe {source}"
    remedy = "No such file or recipe; `raytrain-hpc recipes` lists all recipes"
    matches = [path.stem] if path.stem in recipes else difflib.get_close_matches(path.stem, recipes, n=1)
    if matches:
        remedy = f"No such file or recipe; did you mean the recipe {matches[0]}?"
    raise ConfigError("config", str(source), "", remedy)


def read_description(path: Path) -> str:
    """Return the comment at the top of a recipe, without its `#` characters."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# yaml-language-server:"):
            lines.append(line.removeprefix("#").removeprefix(" "))
    return "\n".join(lines).strip()
