"""Formulas as MathML, which browsers draw by themselves: no script, no font and no network is needed."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the renderer that conf.py names in ``html_math_renderer``."""
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(_converted(node, as_block=False))
    raise nodes.SkipNode


def _block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    if node.get("number"):
        translator.body.append(f'<span class="eqno">({node["number"]})</span>')
    translator.body.append(f"{_converted(node, as_block=True)}</div>\n")
    raise nodes.SkipNode


def _converted(node: nodes.Element, *, as_block: bool) -> str:
    try:
        converted: str = tex2mathml(node.astext(), as_block=as_block)
    except Exception as error:
        place = f"{node.source}:{node.line}"
        raise ExtensionError(f"{place}: {node.astext()!r} is no formula: {error}") from error
    return converted
