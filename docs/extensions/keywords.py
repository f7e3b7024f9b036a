"""Signatures with the keyword arguments and defaults that ``**settings: Unpack[WrapSettings]`` stands for."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from sphinx.application import Sphinx

from hybridremat.planning import settings

_UNPACKED = re.compile(r"\*\*settings: [~\w.]*Unpack\[[~\w.]*?(\w+)\]")


def setup(app: Sphinx) -> dict[str, Any]:
    """Spell settings out once autodoc has made a signature."""
    app.connect("autodoc-process-signature", _spelled_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _spelled_out(
    _app: Sphinx, _what: str, _name: str, _item: object, _options: object, signature: str | None, result: str
) -> tuple[str, str] | None:
    return (_UNPACKED.sub(_keywords, signature), result) if signature else None


def _keywords(found: re.Match[str]) -> str:
    named = getattr(settings, found[1]).__annotations__
    chosen = [item for item in fields(settings.Settings) if item.name in named]
    return ", ".join(f"{item.name}: {item.type} = {item.default!r}" for item in chosen)
