"""What is known about kernels on this device, kept on disk between runs.

One JSON file per device, torch version and thread count, below the user's cache folder
(``HYBRIDREMAT_CACHE`` names another). Files are written whole under a temporary name and renamed; a
damaged file is ignored and replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from hybridremat.files import cache_folder, write_atomic

logger = logging.getLogger(__name__)

# since trials compare several draws, 10 bags are tried with something in each, 9 kernels on what comes
# really, 8 losses by chunks, 7 kernels by parts; 4 could hold times taken on a busy machine
_VERSION = 11
_SECTIONS = ("times", "temporaries", "outputs", "results", "shared", "in place", "by parts")
_NOTHING: Final[Mapping[str, Any]] = {name: {} for name in _SECTIONS}


def device_description(device: str) -> str:
    """What figures depend on: device, torch and its switches, on CPU the instruction set and threads."""
    if device == "cuda":
        parts = [torch.cuda.get_device_name(), torch.__version__, *_allocator()]
    else:
        cpu = torch.backends.cpu.get_cpu_capability()
        parts = [platform.machine(), _cpu_name(), cpu, str(torch.get_num_threads()), torch.__version__]
    return "|".join([*parts, *_switches(device)])


def _switches(device: str) -> list[str]:
    """PyTorch's global settings that choose among kernels, where they are not its defaults."""
    gpu = device == "cuda"
    library = torch.backends.cudnn if gpu else torch.backends.mkldnn
    matmul = torch.backends.cuda.matmul if gpu else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    conv_defaults = ("tf32",) if gpu else ("none", "ieee")
    changed = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        f"{matmul.fp32_precision} products": matmul.fp32_precision not in ("none", "ieee"),
        f"{library.conv.fp32_precision} convolutions": library.conv.fp32_precision not in conv_defaults,
        "no cuDNN" if gpu else "no oneDNN": not library.enabled,
    }
    if gpu:
        changed["cuDNN benchmark"] = torch.backends.cudnn.benchmark
        changed["cuDNN deterministic"] = torch.backends.cudnn.deterministic
    return [name for name, is_changed in changed.items() if is_changed]


def _allocator() -> list[str]:
    """The settings of CUDA's caching allocator, which decide in how large blocks tensors lie."""
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
    return [f"allocator {given}" for name in names if (given := os.environ.get(name))]


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


class KernelStore:
    """What is known of kernels, by their signatures.

    Attributes
    ----------
    times, temporaries
        Nanoseconds, and bytes of workspace.
    outputs
        Bytes of each output's real storage.
    results
        What a kernel returns (``real_results.py``), where that is not as traced.
    shared
        For each output the input whose memory it is, though it is not traced so; −1 for none.
    in_place
        Whether a kernel may write over an input (``… over 0``: the first one), and other trials that pass or
        fail, by their names.
    by_parts
        Bytes of workspace of a kernel by parts; −1 if its bits are others.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._read(_NOTHING)
        try:
            if path is not None and (data := json.loads(path.read_text()))["version"] == _VERSION:
                self._read(data)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self._read(_NOTHING)
            logger.warning("the kernel figures in %s cannot be read; they are measured again", path)
        self._kept = {name: dict(section) for name, section in self._sections().items()}

    @classmethod
    def for_device(cls, device: str) -> KernelStore:
        """The store of this device on this machine."""
        name = hashlib.sha256(device_description(device).encode()).hexdigest()[:16]
        return cls(cache_folder() / f"kernels-{name}.json")

    def _read(self, parts: Mapping[str, Any]) -> None:
        self.times = {str(k): int(v) for k, v in parts["times"].items()}
        self.temporaries = {str(k): int(v) for k, v in parts["temporaries"].items()}
        self.outputs = {str(k): tuple(map(int, v)) for k, v in parts["outputs"].items()}
        self.results = {str(k): list(v) for k, v in parts["results"].items()}
        self.shared = {str(k): tuple(map(int, v)) for k, v in parts["shared"].items()}
        self.in_place = {str(k): v is True for k, v in parts["in place"].items()}
        self.by_parts = {str(k): int(v) for k, v in parts["by parts"].items()}

    def _sections(self) -> dict[str, dict[str, Any]]:
        return {name: getattr(self, name.replace(" ", "_")) for name in _SECTIONS}

    def save(self) -> None:
        """Write the file if anything is new. A folder that cannot be written only costs time later."""
        if self._path is None or self._sections() == self._kept:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps({"version": _VERSION, **self._sections()}))
        except OSError as error:
            logger.warning("kernel figures could not be kept in %s: %s", self._path.parent, error)
