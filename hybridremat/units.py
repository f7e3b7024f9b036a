"""Memory limits, overheads and times as people read and write them.

A limit is bytes (``6442450944``, ``"6GiB"``, ``"1.5GB"``) or a share of the plain step's memory
(``"40%"``). A bare number between 0 and 1 is refused: other tools mean other things by it.
"""

from __future__ import annotations

import math
import re
import sys
from fractions import Fraction
from numbers import Integral
from typing import TypeGuard

from hybridremat.errors import LimitError

_UNITS: dict[str, int] = {
    "": 1,
    "b": 1,
    "byte": 1,
    "bytes": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
_NUMBER = r"([0-9](?:_?[0-9]){0,29}(?:\.[0-9]{1,30})?|\.[0-9]{1,30})"
_SIZE = re.compile(rf"\s*{_NUMBER}\s*([a-zA-Z]*)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_TIME = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|h)", re.IGNORECASE)
_PERCENT = re.compile(rf"\s*{_NUMBER}\s*%\s*")

_SIZES = 'bytes as a whole number (6442450944) or a size ("6GiB", "512 MiB", "1.5GB")'
_LIMITS = f'{_SIZES}, or a share of the plain step\'s memory ("40%")'
_OVERHEADS = 'a fraction of the plain step\'s time that is zero or more (0.1), or a percentage ("10%")'


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """Bytes of a size: ``512``, ``"512 MiB"``, ``"1.5GB"``.

    kB, MB, GB and TB are powers of 1000, KiB, MiB, GiB and TiB powers of 1024; case and spaces do not
    matter. A fraction of a byte is dropped. Zero is allowed (a reserve may be zero; a limit may not).

    Parameters
    ----------
    size
        What the user gave.
    name
        The argument's name, for the error's text.

    Raises
    ------
    LimitError
        If it cannot be read, or is negative.
    """
    return _read_bytes(size, name, _SIZES)


def is_share(limit: object) -> bool:
    """Whether a limit is a share of the plain step's memory (``"40%"``)."""
    return isinstance(limit, str) and _PERCENT.fullmatch(limit) is not None


def resolve_limit(limit: int | str, plain_peak: int, *, name: str = "memory_limit", least: int = 1) -> int:
    """Bytes of a memory limit; ``"40%"`` is taken of ``plain_peak`` (bytes), rounded down.

    A share above 100 % is allowed: it constrains nothing.

    Raises
    ------
    LimitError
        If it cannot be read, is negative, or comes to fewer than ``least`` bytes.
    """
    percent = _PERCENT.fullmatch(limit) if isinstance(limit, str) else None
    if percent is None:
        resolved = _read_bytes(limit, name, _LIMITS)
    else:
        resolved = math.floor(Fraction(percent[1]) * plain_peak / 100)
    if resolved < least:
        raise LimitError(f"{name}={limit!r} leaves no memory at all: no step runs in that. Give {_LIMITS}.")
    return resolved


def parse_overhead(overhead: float | str, *, name: str = "max_overhead") -> float:
    """Read an overhead as a fraction of the plain step's time: ``0.1`` and ``"10%"`` are both 0.1.

    Raises
    ------
    LimitError
        If it cannot be read, is negative, or is not finite.
    """
    if isinstance(overhead, str):
        percent = _PERCENT.fullmatch(overhead)
        if percent is None:
            raise _unreadable(name, overhead, _percent_hint(overhead), _OVERHEADS)
        return float(Fraction(percent[1]) / 100)
    if isinstance(overhead, bool) or not isinstance(overhead, int | float):
        raise _unreadable(name, overhead, "", _OVERHEADS)
    if not 0 <= overhead <= sys.float_info.max:
        raise LimitError(f"{name}={overhead!r} is out of range: give {_OVERHEADS}.")
    return float(overhead)


def parse_seconds(time: float | str, *, name: str, other: str = "") -> float:
    """Seconds of a time: ``10``, ``"10s"``, ``"500 ms"``, ``"2min"``, ``"1h"``.

    ``other``: what else the caller takes, for the error.

    Raises
    ------
    LimitError
        If it cannot be read, or is not more than zero and finite.
    """
    seconds: float | None = None
    if isinstance(time, str):
        if (found := _TIME.fullmatch(time.strip())) is not None:
            seconds = float(found[1]) * _SECONDS[found[2].lower()]
    elif isinstance(time, int | float) and not isinstance(time, bool):
        seconds = float(time)
    if seconds is None or not 0 < seconds <= sys.float_info.max:
        text = f'{name}={time!r} is no time: give seconds (10, "10s"), "500ms", "2min" or "1h"'
        raise LimitError(f"{text}, {other}." if other else f"{text}.")
    return seconds


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether a value is a whole number, no bool, of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_count(name: str, value: object, what: str) -> None:
    """Refuse anything but a whole number of at least 1; ``what`` names for the error what is counted.

    Raises
    ------
    LimitError
    """
    if not is_count(value):
        raise LimitError(f"{name}={value!r} is out of range: give a number ≥ 1 {what}")


def format_bytes(size: int) -> str:
    """Bytes for people, with three or four digits: ``"6.00 GiB"``, ``"218.2 MiB"``, ``"512 B"``."""
    if size < 0:
        return "-" + format_bytes(-size)
    if size < 1024:
        return f"{size} B"
    power = next((power for power in (1, 2, 3) if round(size / 1024**power, 1) < 1024), 4)
    amount, unit = size / 1024**power, f"{' KMGT'[power]}iB"
    return f"{amount:.2f} {unit}" if amount < 9.995 else f"{amount:.1f} {unit}"


def memory_unit(most: int) -> tuple[str, int]:
    """The unit in which an axis shows up to so many bytes, and its bytes: ``("MiB", 1048576)``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if most >= size:
            return unit, size
    return "bytes", 1


def format_time(nanoseconds: int) -> str:
    """Nanoseconds for people: ``"1.2 ms"``."""
    for unit, size in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if nanoseconds >= size:
            amount = nanoseconds / size
            return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"
    return f"{nanoseconds} ns"


def format_share_up(size: int, of: int) -> str:
    """``size`` as a percentage of ``of``, rounded up to one decimal: ``"45.1 %"``.

    Taken as a limit (:func:`resolve_limit` with ``plain_peak=of``), the text gives ``size`` bytes or more.
    """
    return f"{_of_tenths(math.ceil(Fraction(1000 * size, max(1, of))))} %"


def format_overhead_up(overhead: float) -> str:
    """An overhead of 0 or more as a percentage, rounded up to one decimal: ``"12.4%"``.

    :func:`parse_overhead` reads the text as ``overhead`` or more.
    """
    tenths = math.floor(1000 * overhead)
    while float(Fraction(tenths, 1000)) < overhead:  # as the text is read: 0.1 is "10.0%"
        tenths += 1
    return f"{_of_tenths(tenths)}%"


def _of_tenths(tenths: int) -> str:
    return f"{tenths // 10}.{tenths % 10}"


def _read_bytes(size: object, name: str, possible: str) -> int:
    """Return the bytes of an integer or of a string without a percent sign."""
    if isinstance(size, bool):
        raise _unreadable(name, size, "", possible)
    if isinstance(size, Integral):
        if size < 0:
            raise LimitError(f"{name}={size!r} is negative: give {possible}.")
        return int(size)
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    factor = _UNITS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise _unreadable(name, size, _size_hint(size, possible), possible)
    amount = Fraction(match[1].replace("_", ""))
    if factor == 1 and amount.denominator != 1:
        raise _unreadable(name, size, _size_hint(size, possible), possible)
    return math.floor(amount * factor)


def _unreadable(name: str, given: object, hint: str, possible: str) -> LimitError:
    said = f"{name}={given!r} cannot be read"
    return LimitError(f"{said}: {hint} Give {possible}." if hint else f"{said}. Give {possible}.")


def _size_hint(given: object, possible: str) -> str:
    """Return a guess at what was meant, as a sentence, or nothing."""
    if not isinstance(given, float | str):
        return ""
    if isinstance(given, str) and given.strip().lower() == "auto":
        return (
            'memory_limit="auto" is for wrap and plan, which reckon it once from what a CUDA device has '
            "left; elsewhere pass hybridremat.auto_limit(model).limit."
        )
    if "%" in possible and (share := _percent_hint(given)):
        return share
    if isinstance(given, float):
        return f"did you mean {int(given)}?" if given >= 1 and given.is_integer() else ""
    match = _SIZE.fullmatch(given)
    if match and match[2].lower() in ("k", "m", "g", "t"):
        letter = match[2].upper()
        return f'did you mean "{match[1]}{letter}iB" (powers of 1024) or "{match[1]}{letter}B" (of 1000)?'
    return "it is negative." if given.strip().startswith("-") else ""


def _percent_hint(given: float | str) -> str:
    """``did you mean "40%"?`` for 0.4 and for "0.4"."""
    try:
        share = float(given)
    except ValueError:
        return ""
    return f'did you mean "{share * 100:g}%"?' if 0 < share <= 1 else ""
