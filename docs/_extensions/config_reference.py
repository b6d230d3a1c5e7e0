"""Directive `config-reference`: all configuration keys, read from the schema; and links to them from other pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from docutils import nodes
from inline_code import make_paragraph
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from raytrain_hpc.config.field import Section
from raytrain_hpc.config.schema import SECTIONS, get_fields, to_dict
from raytrain_hpc.config.value_types import describe_key_type, describe_type, get_type

REFERENCE_PAGE = "configuration"


class ConfigReference(SphinxDirective):
    """Generate one section per section of the config, with the keys as a definition list.

    The content, the output of `raytrain-hpc config`, is for readers of the Markdown file, and not used.
    """

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        return [self._make_section(name, section) for name, section in SECTIONS.items()]

    def _make_section(self, name: str, section: type[Section]) -> nodes.section:
        node = nodes.section(ids=[name], names=[name])
        node += nodes.title(text=name)
        node += make_paragraph(section.__doc__ or "")
        node += nodes.definition_list(
            "",
            *(
                self._make_key(f"{name}.{f.name.rstrip('_')}", f, describe_key_type(f"{name}.{f.name.rstrip('_')}"))
                for f in fields(section)
            ),
            classes=["config-keys"],
        )
        return node

    def _make_key(self, key: str, field: Field[Any], type_text: str) -> nodes.definition_list_item:
        term = nodes.term("", "", nodes.literal(text=key), ids=[key])
        term += nodes.reference("", "¶", refuri=f"#{key}", classes=["headerlink"])
        definition = nodes.definition("", make_paragraph(field.metadata["doc"]))
        definition += nodes.paragraph("", "", *_describe_values(field, type_text), classes=["config-values"])
        definition += list(self._make_item_keys(key))
        return nodes.definition_list_item("", term, definition)

    def _make_item_keys(self, key: str) -> Iterator[nodes.Node]:
        """Yield the keys of the mappings in a list, for keys such as data.sources."""
        declared = get_type(key) if key in get_fields() else None
        if get_origin(declared) is not list or not issubclass(get_args(declared)[0], Section):
            return
        item = get_args(declared)[0]
        hints = get_type_hints(item)
        yield nodes.paragraph(text="Keys of each item:")
        yield nodes.definition_list(
            "", *(self._make_key(f"{key}[].{f.name}", f, describe_type(hints[f.name])) for f in fields(item))
        )


def _describe_values(field: Field[Any], type_text: str) -> Iterator[nodes.Node]:
    """Yield the type, the default and the bound of a key."""
    yield nodes.Text(f"Values: {type_text}. Default: ")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    yield nodes.literal(text=yaml.safe_dump(to_dict(default), default_flow_style=True).split("\n")[0] or '""')
    minimum, above = field.metadata["minimum"], field.metadata["above"]
    bound = f". At least {minimum:g}" if minimum is not None else f". More than {above:g}" if above is not None else ""
    yield nodes.Text(f"{bound}.")


class ConfigKeyLinks(SphinxPostTransform):
    """Link every configuration key in code font to its entry in the reference."""

    default_priority = 400

    def run(self, **kwargs: Any) -> None:
        """Replace the literals of this page that begin with a key by links."""
        if self.env.docname == REFERENCE_PAGE or self.app.builder.format != "html":
            return
        page = self.app.builder.get_relative_uri(self.env.docname, REFERENCE_PAGE)
        for literal in list(self.document.findall(nodes.literal)):
            key, _, value = literal.astext().partition("=")
            if key in get_fields() and " " not in value and not isinstance(literal.parent, nodes.reference):
                literal.replace_self(nodes.reference("", "", literal.deepcopy(), refuri=f"{page}#{key}"))


def setup(app: Sphinx) -> ExtensionMetadata:
    """Register the directive and the links."""
    app.add_directive("config-reference", ConfigReference)
    app.add_post_transform(ConfigKeyLinks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
