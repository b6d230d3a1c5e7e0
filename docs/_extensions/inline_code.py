"""Text with code between backticks, as nodes: descriptions in the package are plain text."""

from __future__ import annotations

import re

from docutils import nodes

_CODE = re.compile(r"`([^`]+)`")


def make_paragraph(text: str) -> nodes.paragraph:
    """Return a paragraph in which the parts between backticks are literals."""
    parts = (
        nodes.literal(text=part) if index % 2 else nodes.Text(part) for index, part in enumerate(_CODE.split(text))
    )
    return nodes.paragraph("", "", *parts)
