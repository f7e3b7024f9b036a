"""Limits and overheads of the command line as the functions take them."""

from __future__ import annotations


def limit_value(text: str | None) -> int | str | None:
    """Bytes as a number; ``6GiB`` and ``50%`` stay text."""
    return int(text) if text and text.isdigit() else text


def overhead_value(text: str | None) -> float | str | None:
    """``0.1`` as a number; ``10%`` stays text, and so does what is no number, for the error to quote."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text
