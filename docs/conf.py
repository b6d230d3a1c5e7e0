"""Sphinx configuration. Build with `sphinx-build -W --keep-going -b html docs docs/_build/html`."""

import sys
from importlib.metadata import version as get_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "raytrain_hpc"
copyright = "the authors of raytrain_hpc"
release = version = get_version("raytrain-hpc")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinxcontrib.mermaid",
    "config_reference",
    "metric_reference",
    "recipe_reference",
    "repository_links",
]
exclude_patterns = ["_build", "_extensions"]

# Docstrings use Google style and mark code with single backticks.
default_role = "literal"
smartquotes_action = "D"  # dashes, but straight quotes and dots: they are often code
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_class_signature = "separated"
autodoc_default_options = {"exclude-members": "__init__, __new__"}  # functions return these objects
napoleon_numpy_docstring = False

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"raytrain_hpc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
