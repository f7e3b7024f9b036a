"""How Sphinx builds the pages: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path

import hybridremat

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "hybridremat"
author = "the authors of hybridremat"
copyright = "the authors of hybridremat; Apache-2.0"  # noqa: A001 (Sphinx reads this name)
version = release = hybridremat.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "results", "keywords", "mathml"]
myst_enable_extensions = ["dollarmath", "amsmath", "deflist", "colon_fence"]
myst_heading_anchors = 4
exclude_patterns = ["_build", "extensions"]

# The pages are read without a network: no remote script, font or style sheet, and formulas are MathML.
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"hybridremat {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_copy_source = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

# Every reference has to lead somewhere. Names of other projects, and of types that are not public, do not.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|nn|pathlib|collections|typing|argparse|enum)\..*"),
    (r"py:.*", r"hybridremat\.(graph|blocks|sequence|planning\.settings|integrations\.loop_options)\..*"),
    (r"py:class", r"hybridremat\.(api\.M|compiler\.opaque_calls\.F)"),  # type variables
    (r"py:mod", r".*"),
    (r"py:.*", r"(?!hybridremat).*"),
]
