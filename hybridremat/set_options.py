"""``--set KEY=VALUE`` as data, and what to say of a key that nobody knows."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from hybridremat.errors import TargetError

Changes = dict[str, object]


def parse_sets(texts: Iterable[str]) -> Changes:
    """Keys and values of ``KEY=VALUE``; a value is a Python literal if it can be read as one, else text.

    Raises
    ------
    TargetError
        If there is no key, or it is given twice.
    """
    changes: Changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise TargetError(f"--set {text}: write KEY=VALUE, as in --set n_layer=24")
        if key in changes:
            raise TargetError(f"--set {key} is given twice, as {changes[key]!r} and as {value}")
        changes[key] = _literal(value)
    return changes


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def unknown_key(key: str, owner: str, known: Iterable[str], common: Sequence[str]) -> TargetError:
    """The error for a key: what comes close among ``known``, and what is common."""
    close = get_close_matches(key, dict.fromkeys(known), n=3)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return TargetError(f"--set {key}: {owner} has no such field; {hint}Common ones: {', '.join(common)}.")


def whole_number(key: str, value: object) -> int:
    """``value`` as a count of at least one.

    Raises
    ------
    TargetError
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TargetError(f"--set {key}={value!r}: give a whole number of at least 1")
    return value
