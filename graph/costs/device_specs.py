"""Devices that a plan can be made for without having one: rates and memory, from their data sheets.

Peak rates are those of dense products, without sparsity. Kernels do not reach them: times are reckoned with
``ACHIEVABLE_FLOPS`` and ``ACHIEVABLE_BANDWIDTH`` of the peaks, assumed alike for all devices; small products
reach less. Plans depend on the ratios of times alone, and their memory does not depend on times.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hybridremat.errors import DeviceSpecError
from hybridremat.graph.costs.cost_models import DeviceRates

ACHIEVABLE_FLOPS = 0.7
ACHIEVABLE_BANDWIDTH = 0.8

TERA, GIGA, GIBI = 1e12, 1e9, 1 << 30


@dataclass(frozen=True)
class DeviceSpec:
    """A device to plan for.

    Attributes
    ----------
    name
        What plans call it.
    fp32, tf32, bf16, fp16
        Peak flops in a second of dense matrix products, by the type of their inputs. ``tf32`` is what
        convolutions of float32 run in, ``fp32`` its other products: PyTorch's defaults on CUDA.
    bandwidth
        Peak bytes in a second from and to its memory.
    memory
        Bytes.
    allocation
        Sizes are rounded up to a multiple of this: 512 bytes in PyTorch's CUDA caching allocator.
    call_ns
        Nanoseconds that every kernel takes at least.
    capability
        Its compute capability, 90 for sm_90: it decides which attention kernels PyTorch takes.
    host_out, host_in, duplex
        Bytes in a second that copies to host memory and back reach; whether both ways go at one time.
    """

    name: str
    fp32: float
    tf32: float
    bf16: float
    fp16: float
    bandwidth: float
    memory: int
    allocation: int = 512
    call_ns: float = 4_000
    capability: int = 80
    host_out: float = 25e9
    host_in: float = 25e9
    duplex: bool = True

    def rates(self, dtype: str, *, convolution: bool = False) -> DeviceRates:
        """What it achieves in products of a type, named as torch names it."""
        by_type = {"bfloat16": self.bf16, "float16": self.fp16}
        peak = by_type.get(dtype, self.tf32 if convolution and dtype == "float32" else self.fp32)
        return DeviceRates(ACHIEVABLE_FLOPS * peak, ACHIEVABLE_BANDWIDTH * self.bandwidth, self.call_ns)

    def rounded(self, size: int) -> int:
        """Bytes that its allocator takes for ``size``."""
        return -(-size // self.allocation) * self.allocation


def _spec(
    name: str, *teraflops: float, bandwidth: float, memory: float, sm: int, link: float = 25
) -> DeviceSpec:
    """Teraflops in the order of the fields; GB in a second; GiB (a card's "80 GB", less what is reserved)."""
    fp32, tf32, bf16, fp16 = (TERA * rate for rate in teraflops)
    return DeviceSpec(
        name,
        fp32,
        tf32,
        bf16,
        fp16,
        GIGA * bandwidth,
        int(GIBI * memory),
        capability=sm,
        host_out=GIGA * link,
        host_in=GIGA * link,
    )


# NVIDIA's data sheets of H200 (2024; its 141 GB are 139.7 GiB with what is reserved), H100, A100 (40 and 80
# GB), L40S, L4, A10, V100 (SXM2) and T4; for the GeForce cards the whitepapers "Ada GPU Architecture" and
# "Ampere GA102 GPU Architecture" (products accumulated in float32). Where a sheet gives rates with sparsity,
# half of them stand here. Volta and Turing know no tf32 and bf16: both run at the rate of fp32 there. Links
# to host memory are PCI Express with 16 lanes of generation 3, 4 (where nothing is said) or 5, at what copies
# of pinned memory reach each way, some 80 % of the nominal rate.
_SPECS = (
    _spec("h200", 67, 494.7, 989.4, 989.4, bandwidth=4800, memory=139.7, sm=90, link=50),
    _spec("h100", 67, 494.7, 989.4, 989.4, bandwidth=3350, memory=80, sm=90, link=50),
    _spec("h100-pcie", 51, 378, 756, 756, bandwidth=2000, memory=80, sm=90, link=50),
    _spec("a100-80g", 19.5, 156, 312, 312, bandwidth=2039, memory=80, sm=80),
    _spec("a100-40g", 19.5, 156, 312, 312, bandwidth=1555, memory=40, sm=80),
    _spec("l40s", 91.6, 183, 362, 362, bandwidth=864, memory=48, sm=89),
    _spec("l4", 30.3, 60.5, 121, 121, bandwidth=300, memory=24, sm=89),
    _spec("a10", 31.2, 62.5, 125, 125, bandwidth=600, memory=24, sm=86),
    _spec("v100", 15.7, 15.7, 15.7, 125, bandwidth=900, memory=32, sm=70, link=12),
    _spec("t4", 8.1, 8.1, 8.1, 65, bandwidth=300, memory=16, sm=75, link=12),
    _spec("rtx4090", 82.6, 82.6, 165.2, 165.2, bandwidth=1008, memory=24, sm=89),
    _spec("rtx3090", 35.6, 35.6, 71, 71, bandwidth=936, memory=24, sm=86),
)

#: Known devices by name.
DEVICE_SPECS = {spec.name: spec for spec in _SPECS}

#: Bytes in a second that a device sends to others in one host, each way: NVLink of the data sheets (SXM),
#: which give the sum of both ways. Devices of PCI Express alone are not among them: that depends on the host.
LINKS = {"h200": 450e9, "h100": 450e9, "a100-80g": 300e9, "a100-40g": 300e9, "v100": 150e9}

_OTHER_NAMES = {"h100-80g": "h100", "h100-sxm": "h100", "h200-141g": "h200"}


_FIELDS = {item.name: item for item in fields(DeviceSpec)}
_WHOLE = ("memory", "allocation", "capability")
# Rates in other units than ours (teraflops, GB) fall below a million.
_RANGES = {"memory": (1, 1e30), "allocation": (1, 1 << 30), "call_ns": (0, 1e9), "capability": (50, 121)}
_RATE = "give flops in a second, as in 19.5e12"
_MEANING = {
    "bandwidth": "give bytes in a second, as in 2.0e12",
    "memory": "give bytes, as in 85899345920",
    "allocation": "give a whole number of bytes, at least 1",
    "call_ns": "give nanoseconds, 0 to 1e9",
    "capability": "give a whole number from 50 to 121, as in 90 for sm_90",
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
    name = str(given).lower()
    known = DEVICE_SPECS.get(_OTHER_NAMES.get(name, name))
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
    if name == "duplex":
        if isinstance(value, bool):
            return value
        raise DeviceSpecError(f"device_spec {path}: duplex={value!r}; give true or false")
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not least <= number <= most or (name in ("allocation", "capability") and number % 1):
        raise DeviceSpecError(f"device_spec {path}: {name}={value!r}; {_MEANING.get(name, _RATE)}")
    return int(number) if name in _WHOLE else float(number)
