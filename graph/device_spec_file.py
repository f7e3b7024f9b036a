"""Device specs by name, or from a JSON or TOML file with the fields of DeviceSpec."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hybridremat.errors import DeviceSpecError
from hybridremat.graph.device_specs import DEVICE_SPECS, DeviceSpec

_FIELDS = {item.name: item for item in fields(DeviceSpec)}
_WHOLE = ("memory", "allocation")
# Rates in other units than ours (teraflops, GB) fall below a million.
_RANGES = {"memory": (1, 1e30), "allocation": (1, 1 << 30), "call_ns": (0, 1e9)}
_RATE = "give flops in a second, as in 19.5e12"
_MEANING = {
    "bandwidth": "give bytes in a second, as in 2.0e12",
    "memory": "give bytes, as in 85899345920",
    "allocation": "give a whole number of bytes, at least 1",
    "call_ns": "give nanoseconds, 0 to 1e9",
}


def device_spec(given: str | Path | DeviceSpec) -> DeviceSpec:
    """The device of that name, or the one that a file describes.

    Raises
    ------
    DeviceSpecError
        If the name is unknown, or the file is not there, cannot be read, or lacks or misspells a field.
    """
    if isinstance(given, DeviceSpec):
        return _checked(f"{given.name!r}", asdict(given))
    if not isinstance(given, str | Path):
        raise DeviceSpecError(f"device_spec={given!r}: give a name, a file or a DeviceSpec")
    known = DEVICE_SPECS.get(str(given).lower())
    if known is not None:
        return known
    path = Path(given)
    if path.suffix.lower() in (".json", ".toml"):
        return _from_file(path)
    close = get_close_matches(str(given).lower(), DEVICE_SPECS, n=1)
    hint = f"; did you mean {close[0]}?" if close else "."
    raise DeviceSpecError(
        f"device_spec {str(given)!r} is not known{hint} There are {', '.join(DEVICE_SPECS)}, and "
        f"files that end in .json or .toml with {', '.join(_FIELDS)}"
    )


def _from_file(path: Path) -> DeviceSpec:
    try:
        text = path.read_text(encoding="utf-8")
        data = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as error:
        raise DeviceSpecError(f"device_spec {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # JSON, TOML and UTF-8 alike
        raise DeviceSpecError(f"device_spec {path} is not {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(data, Mapping):
        raise DeviceSpecError(f"device_spec {path} holds no table of fields; give {', '.join(_FIELDS)}")
    return _checked(path, data)


def _checked(path: Path | str, data: Mapping[str, object]) -> DeviceSpec:
    unknown = [name for name in data if name not in _FIELDS]
    if unknown:
        raise DeviceSpecError(
            f"device_spec {path}: {', '.join(unknown)}: no field of a device; there are {', '.join(_FIELDS)}"
        )
    missing = [name for name, item in _FIELDS.items() if item.default is MISSING and name not in data]
    if missing:
        raise DeviceSpecError(
            f"device_spec {path} lacks {', '.join(missing)}: flops and bytes in a second, memory in bytes"
        )
    checked: dict[str, Any] = {name: _field(path, name, value) for name, value in data.items()}
    return DeviceSpec(**checked)


def _field(path: Path | str, name: str, value: object) -> str | float | int:
    if name == "name":
        if isinstance(value, str) and value.strip():
            return value
        raise DeviceSpecError(f"device_spec {path}: name={value!r} is no name")
    least, most = _RANGES.get(name, (1e6, 1e30))
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not least <= number <= most or (name == "allocation" and number % 1):
        raise DeviceSpecError(f"device_spec {path}: {name}={value!r}; {_MEANING.get(name, _RATE)}")
    return int(number) if name in _WHOLE else float(number)
