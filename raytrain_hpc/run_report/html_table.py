"""HTML tables."""

from __future__ import annotations

from collections.abc import Sequence


def render_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table with a header. Names and cells must be HTML already."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
