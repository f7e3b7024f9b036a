"""Sizes as expressions of a step's dynamic dimensions, as plain data: nothing here imports torch.

One capture with symbols for some dimensions of the inputs describes the step at every size it is right for:
the numbers in its calls, and the conditions that it relies on, are expressions of these symbols.

Units: bytes; a symbol is a length, in elements.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from typing import Any, Final

Sizes = Mapping[str, int]
"""A number for each symbol, by its name."""


@dataclass(frozen=True, slots=True)
class Term:
    """An operation on sizes; ``op`` is one of :data:`OPERATIONS`. Of conditions the value is 0 or 1."""

    op: str
    args: tuple[Size, ...]

    def __str__(self) -> str:
        inner = [str(each) for each in self.args]
        if self.op in ("max", "min", "not"):
            return f"{self.op}({', '.join(inner)})"
        return f"({f' {self.op} '.join(inner)})"


Size = int | str | Term
"""A number, the name of a symbol, or a term."""

OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "+": lambda *given: sum(given),
    "*": lambda *given: prod(given),
    "//": operator.floordiv,
    "%": operator.mod,
    "max": max,
    "min": min,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    "and": lambda *given: all(given),
    "or": lambda *given: any(given),
    "not": operator.not_,
}
"""What each operation does with its arguments, whole numbers of any sign; ``//`` and ``%`` as in Python."""


def evaluated(size: Size, at: Sizes) -> int:
    """The number that a size is at some sizes.

    Raises
    ------
    KeyError
        If a symbol has no number.
    ZeroDivisionError
        If something is divided by a size that is 0.
    """
    if isinstance(size, Term):
        return int(OPERATIONS[size.op](*(evaluated(each, at) for each in size.args)))
    return at[size] if isinstance(size, str) else size


def symbols_of(size: Size) -> frozenset[str]:
    """The names of the symbols that a size depends on."""
    if isinstance(size, Term):
        return frozenset[str]().union(*map(symbols_of, size.args))
    return frozenset([size]) if isinstance(size, str) else frozenset()


def renamed(size: Size, names: Mapping[str, str]) -> Size:
    """A size with other names for its symbols.

    Raises
    ------
    KeyError
        If a symbol has none.
    """
    if isinstance(size, Term):
        return Term(size.op, tuple(renamed(each, names) for each in size.args))
    return names[size] if isinstance(size, str) else size


def combined(op: str, *sizes: Size) -> Size:
    """A sum or a product of sizes, numbers put together."""
    join, neutral = (operator.add, 0) if op == "+" else (operator.mul, 1)
    number = reduce(join, (each for each in sizes if isinstance(each, int)), neutral)
    others = tuple(each for each in sizes if not isinstance(each, int))
    if not others or (op == "*" and number == 0):
        return number
    kept = others if number == neutral else (number, *others)
    return kept[0] if len(kept) == 1 else Term(op, kept)


def rounded_up(size: Size, multiple: int) -> Size:
    """The least multiple of a number that is no less than a size."""
    if isinstance(size, int):
        return -(-size // multiple) * multiple
    return Term("*", (multiple, Term("//", (combined("+", multiple - 1, size), multiple))))


def as_data(size: Size) -> Any:
    """A size as lists, texts and numbers, for JSON; :func:`from_data` reads it."""
    return [size.op, *map(as_data, size.args)] if isinstance(size, Term) else size


def from_data(data: Any) -> Size:
    """The size that :func:`as_data` wrote.

    Raises
    ------
    ValueError
        If an operation is unknown, or it is nothing that was written so.
    """
    if isinstance(data, list) and len(data) > 1 and isinstance(data[0], str) and data[0] in OPERATIONS:
        return Term(data[0], tuple(map(from_data, data[1:])))
    if isinstance(data, bool) or not isinstance(data, (int, str)):
        raise ValueError(f"{data!r} is no size")
    return data


@dataclass(frozen=True)
class Domain:
    """The sizes that one capture is right for.

    Attributes
    ----------
    ranges
        For each symbol its least and its greatest number; None if there is none.
    guards
        Conditions on the symbols that the capture relies on: PyTorch traced another graph where one fails.
    """

    ranges: Mapping[str, tuple[int | None, int | None]]
    guards: tuple[Size, ...] = ()

    def refused(self, sizes: Sizes) -> tuple[str, ...]:
        """Why some sizes need a capture of their own, each reason as text; empty if they do not."""
        found = [f"{name} is not given" for name in self.ranges if name not in sizes]
        for name, (least, most) in self.ranges.items() if not found else ():
            below, above = least is not None and sizes[name] < least, most is not None and sizes[name] > most
            if below or above:
                ends = ("any size" if end is None else end for end in (least, most))
                found.append(f"{name} = {sizes[name]} is outside {' to '.join(map(str, ends))}")
        failing = () if found else (each for each in self.guards if not evaluated(each, sizes))
        return (*found, *map(str, failing))

    def renamed(self, names: Mapping[str, str]) -> Domain:
        """The same sizes by other names; what has none of these is left out."""
        return Domain(
            {names[name]: ends for name, ends in self.ranges.items() if name in names},
            tuple(renamed(each, names) for each in self.guards if symbols_of(each) <= names.keys()),
        )
