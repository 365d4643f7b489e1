"""Sphinx's configuration of the documentation as a site: see tools/build_site.py."""

import re

from portmm.version import VERSION

project, author, release = "portmm", "The portmm developers", VERSION
copyright = author  # noqa: A001 - Sphinx's name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
exclude_patterns = ["examples"]
html_theme, html_title = "furo", f"portmm {VERSION}"
html_copy_source = False
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block"]
autodoc_typehints = "none"  # arrays of several libraries are Any
autodoc_member_order = "bysource"
napoleon_use_rtype = False
default_role = "literal"
CODE = re.compile(r"(`[^`]*`)")


def plain(_app, _what, _name, _object, _options, lines):
    """Docstrings are plain text with code in backquotes: stars and bars mean themselves."""
    for i, line in enumerate(lines):
        parts = CODE.split(line)
        parts[::2] = [re.sub(r"(?<!\\)([*|])", r"\\\1", x) for x in parts[::2]]
        lines[i] = "".join(parts)


def setup(app):
    """Register it, before docstrings of Google's style are translated."""
    app.connect("autodoc-process-docstring", plain, priority=400)
