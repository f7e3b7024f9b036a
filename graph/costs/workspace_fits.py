"""What a kernel takes, as bytes for each element of what it makes: for kernels that compute each by itself.

Such a kernel holds, at its peak, so many tensors of the size of its result, and what a plain number became.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

ENOUGH: Final = 3
"""Further numbers of elements whose bytes a fit has to give, each measured, before it is used."""

MOST_FIXED: Final = 64
"""Bytes that are taken whatever the size: a few numbers."""

_LEAST: Final = 1024
"""Elements: with fewer the two parts of a fit could not be told apart."""


@dataclass
class WorkspaceFit:
    """Bytes of workspace, for the elements of what is made at one time.

    Attributes
    ----------
    each, fixed
        Bytes for each element, and bytes beside.
    seen
        The numbers of elements at which it has been compared with what was measured; first the one that it
        was made of.
    wrong
        Whether it was another number once: it is never used again.
    """

    each: int
    fixed: int
    seen: set[int] = field(default_factory=set)
    wrong: bool = False

    @staticmethod
    def of(takes: int, elements: int) -> WorkspaceFit | None:
        """From what was measured for a number of elements; None if that tells nothing."""
        if elements < _LEAST:
            return None
        each, fixed = divmod(takes, elements)
        return WorkspaceFit(each, fixed, {elements}) if fixed <= MOST_FIXED else None

    def at(self, elements: int) -> int:
        """Bytes for a number of elements."""
        return self.each * elements + self.fixed

    @property
    def known(self) -> bool:
        """Whether it may be used in place of measuring."""
        return not self.wrong and len(self.seen) > ENOUGH

    def compare(self, takes: int, elements: int) -> None:
        """Compare it with what was measured."""
        self.wrong = self.wrong or takes != self.at(elements)
        self.seen.add(elements)
