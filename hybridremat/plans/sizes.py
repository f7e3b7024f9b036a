"""What plans tell of other sizes of their inputs, where one capture is planned at many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hybridremat.errors import InputError
from hybridremat.plans.origin import TensorSpec
from hybridremat.units import is_count

Place = tuple[int, int]
"""A dimension of an input: the number of a tensor among the inputs, and one of its dimensions."""


@dataclass(frozen=True)
class SizeRow:
    """The step at some sizes.

    Attributes
    ----------
    sizes
        By name.
    memory_limit
        Bytes of the limit there.
    plain_peak, needed, overhead
        Bytes of the plain step, those that the plan's step takes with the caller's code, and its extra time
        as a fraction; None if nothing fits there.
    least
        Where nothing fits: the least limit in bytes that is known to be feasible; else None.
    """

    sizes: Mapping[str, int]
    memory_limit: int | None
    plain_peak: int | None
    needed: int | None
    overhead: float | None
    least: int | None = None

    @property
    def text(self) -> str:
        """The sizes in words."""
        return ", ".join(f"{name}={size}" for name, size in self.sizes.items())

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {**vars(self), "sizes": dict(self.sizes)}


def require_sizes(sizes: Mapping[str, object]) -> None:
    """Refuse sizes that are no whole numbers above 0.

    Raises
    ------
    InputError
    """
    for name, size in sizes.items():
        if not is_count(size):
            raise InputError(f"{name}={size!r} is no size: give a whole number ≥ 1")


def combinations(sizes: Mapping[str, Any]) -> list[dict[str, int]]:
    """All combinations of several sizes of each name.

    Raises
    ------
    InputError
        If a name has no list of sizes, or one of them is no whole number above 0.
    """
    for name, several in sizes.items():
        if isinstance(several, str) or not isinstance(several, Iterable):
            raise InputError(f"{name}={several!r} is no list of sizes: give {name}=[64, 128], or a range")
    found = [dict(zip(sizes, each, strict=True)) for each in product(*sizes.values())]
    for each in found:
        require_sizes(each)
    return found


def require_several(sizes: object) -> None:
    """Refuse what is no list of sizes by name, or an empty one.

    Raises
    ------
    InputError
    """
    listed = list(sizes) if isinstance(sizes, Sequence) else []
    if not listed or not all(isinstance(each, Mapping) and each for each in listed):
        raise InputError(f'sizes={sizes!r} names no sizes: give sizes=[{{"length": 64}}, {{"length": 128}}]')
    for each in listed:
        require_sizes(each)


def varying(rows: Sequence[SizeRow]) -> str | None:
    """The name of the size that takes most numbers in some rows; None if none takes several."""
    names = rows[0].sizes if rows else {}
    counted = {name: len({row.sizes[name] for row in rows}) for name in names}
    return max(counted, key=lambda name: counted[name]) if max(counted.values(), default=1) > 1 else None


def curves(rows: Sequence[SizeRow], over: str) -> list[list[SizeRow]]:
    """The rows that fit, in one list for each combination of the other sizes, by the size named."""
    groups: dict[tuple[int, ...], list[SizeRow]] = {}
    for row in sorted(rows, key=lambda row: row.sizes[over]):
        if row.needed is not None:
            others = tuple(size for name, size in row.sizes.items() if name != over)
            groups.setdefault(others, []).append(row)
    return list(groups.values())


def dimension_names(
    groups: Iterable[Sequence[Place]], inputs: Sequence[TensorSpec]
) -> dict[str, tuple[Place, ...]]:
    """Names for sizes, each the places that it has among the inputs.

    The first dimension is the batch, the second of an input with up to three the length, the last two of one
    with four height and width; others are named by input and dimension (``"x.1"``).
    """
    found: dict[str, tuple[Place, ...]] = {}
    for places in sorted(groups, key=lambda each: min(each)):
        ranked = sorted(places, key=lambda place: (len(inputs[place[0]].shape), place))
        names = [name for place in ranked if (name := _name(place, inputs)) is not None]
        number, dim = ranked[0]
        free = (name for name in names if name not in found)
        found[next(free, f"{inputs[number].name}.{dim}")] = tuple(places)
    return found


def _name(place: Place, inputs: Sequence[TensorSpec]) -> str | None:
    number, dim = place
    dims = len(inputs[number].shape)
    if dim == 0:
        return "batch"
    if dims <= 3:
        return "length" if dim == 1 else None
    return {2: "height", 3: "width"}.get(dim) if dims == 4 else None


def equal_dimensions(inputs: Sequence[TensorSpec]) -> list[tuple[Place, ...]]:
    """The dimensions of inputs, those of one size together, but for those of size 0 and 1."""
    groups: dict[int, list[Place]] = {}
    for number, spec in enumerate(inputs):
        for dim, size in enumerate(spec.shape):
            if size > 1:
                groups.setdefault(size, []).append((number, dim))
    return [tuple(each) for each in groups.values()]
