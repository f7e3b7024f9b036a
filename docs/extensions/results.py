"""Frozen dataclasses that people get, and never make: their fields count, not their constructors.

Fields that a docstring describes together ("overhead, extra_flops") stand one by one: napoleon splits such
names among parameters, not among attributes, and takes the first of them for a type.
"""

from __future__ import annotations

import re
from dataclasses import is_dataclass
from typing import Any

from sphinx.application import Sphinx

_TOGETHER = re.compile(r":ivar (\w+(?:, \w+)+):(.*)")


def setup(app: Sphinx) -> dict[str, Any]:
    """Leave constructors out, and look at docstrings after napoleon."""
    app.connect("autodoc-process-signature", _without_constructor)
    app.connect("autodoc-process-docstring", _split, priority=900)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _without_constructor(
    _app: Sphinx, _what: str, _name: str, item: object, *_: object
) -> tuple[str, str] | None:
    return ("", "") if isinstance(item, type) and is_dataclass(item) else None


def _split(_app: Sphinx, _what: str, _name: str, _item: object, _options: object, lines: list[str]) -> None:
    split: list[str] = []
    for line in lines:
        found = _TOGETHER.match(line)
        if found is None:
            split.append(line)
        else:
            *first, last = found[1].split(", ")
            split += [f":ivar {name}: see {last}" for name in first]
            split.append(f":ivar {last}:{found[2]}")
    lines[:] = split
