"""Directive `recipe-reference`: the installed recipes, with the first paragraph of their descriptions."""

from __future__ import annotations

from docutils import nodes
from inline_code import make_paragraph
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from raytrain_hpc.config.recipes import list_recipes, read_description


class RecipeReference(SphinxDirective):
    """Generate a definition list of recipes."""

    def run(self) -> list[nodes.Node]:
        """Return the list."""
        items = (
            nodes.definition_list_item(
                "",
                nodes.term("", "", nodes.literal(text=name)),
                nodes.definition("", make_paragraph(read_description(path).split("\n\n")[0].replace("\n", " "))),
            )
            for name, path in list_recipes().items()
        )
        return [nodes.definition_list("", *items, classes=["config-keys"])]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("recipe-reference", RecipeReference)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
