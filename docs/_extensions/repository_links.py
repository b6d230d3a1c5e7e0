"""Links that work both in the repository and on the site.

Documents link to each other by relative paths, as they are read in the repository. Some files outside of docs/ have a
page on the site that includes them. This extension makes links to such a file lead to its page, makes the links inside
included files relative to docs/, and offers other files as downloads.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util.typing import ExtensionMetadata

# File in the repository -> page that includes it.
PAGES = {"ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md", "benchmarks/RESULTS.md": "benchmarks.md"}
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s#]+)")


def rewrite_links(text: str, directory: Path, docs: Path) -> str:
    """Return Markdown with the links of a file in `directory` made relative to `docs`, or to the page of their file."""

    def rewrite(match: re.Match[str]) -> str:
        target = (directory / match[1]).resolve()
        if page := PAGES.get(os.path.relpath(target, docs.parent)):
            return f"]({page}"
        is_download = target.is_file() and not target.is_relative_to(docs)
        return f"]({'path:' if is_download else ''}{os.path.relpath(target, docs)}"

    return _LINK.sub(rewrite, text)


def _rewrite_page(app: Sphinx, docname: str, content: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".md":
        content[0] = rewrite_links(content[0], path.parent, Path(app.srcdir))


def _rewrite_included(app: Sphinx, relative_path: Path, parent_docname: str, content: list[str]) -> None:
    docs = Path(app.srcdir)
    content[0] = rewrite_links(content[0], (docs / relative_path).resolve().parent, docs)


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the rewriting of links."""
    app.connect("source-read", _rewrite_page)
    app.connect("include-read", _rewrite_included)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
