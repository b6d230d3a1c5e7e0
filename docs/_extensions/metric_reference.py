"""Directive `metric-reference`: all metric keys with their definitions, read from the package."""

from __future__ import annotations

from docutils import nodes
from inline_code import make_paragraph
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from raytrain_hpc.observability.metrics import METRIC_KEYS, RANK_STATISTIC_KEYS, STATISTICS


class MetricReference(SphinxDirective):
    """Generate a definition list of metric keys, and a paragraph about statistics over ranks."""

    def run(self) -> list[nodes.Node]:
        """Return the list and the paragraph."""
        items = (
            nodes.definition_list_item(
                "",
                nodes.term("", "", nodes.literal(text=key), ids=[key.replace("/", "-")]),
                nodes.definition("", make_paragraph(text)),
            )
            for key, text in METRIC_KEYS.items()
            if not key.startswith("ranks/")
        )
        kinds = ", ".join(f"{kind} ({description})" for kind, description in STATISTICS.items())
        keys = ", ".join(f"`{key}`" for key in RANK_STATISTIC_KEYS)
        text = f"Statistics over ranks have the keys `ranks/KEY/KIND`. KIND is {kinds}. KEY is one of {keys}."
        return [nodes.definition_list("", *items, classes=["config-keys"]), make_paragraph(text)]


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive."""
    app.add_directive("metric-reference", MetricReference)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
