"""What a plan file holds, as JSON types, before anything is made from it.

Files come from other machines and people, so what no plan holds is refused here, once for all of its fields.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from pathlib import Path
from typing import Final

from hybridremat.errors import PlanFormatError
from hybridremat.units import format_bytes

MOST_BYTES: Final = 64 * 1024**2
"""The largest file that is read or written. In memory its data takes up to some 30 times as much."""
DEEPEST: Final = 64
"""The most lists and objects within each other."""
LARGEST: Final = 2**63
"""Whole numbers are below this, of either sign."""
_NO_TEXT: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
"""What steers a terminal, turns the direction of text, or is no character."""


def read_data(path: Path) -> object:
    """The JSON data of a file.

    Raises
    ------
    PlanFormatError
        If it is no JSON, larger than ``MOST_BYTES``, or holds what no plan holds.
    OSError
        If it cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise PlanFormatError(f"it takes more than {format_bytes(MOST_BYTES)}, the most that is read")
    try:
        data: object = json.loads(content.decode())
    except (ValueError, RecursionError) as error:  # JSON and UTF-8 alike
        raise PlanFormatError(f"not a plan: it is not JSON ({error})") from error
    _require_plain(data)
    return data


def _require_plain(data: object) -> None:
    level = [data]
    for _ in range(DEEPEST):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.keys()
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            elif not _is_plain(each):
                raise PlanFormatError(f"the plan is damaged: no plan holds {repr(each)[:80]}")
        if not inner:
            return
        level = inner
    raise PlanFormatError(f"the plan is damaged: it is nested in more than {DEEPEST} levels")


def _is_plain(each: object) -> bool:
    if isinstance(each, str):
        return _NO_TEXT.search(each) is None
    if isinstance(each, float):
        return isfinite(each)
    return each is None or (isinstance(each, int) and -LARGEST < each < LARGEST)
