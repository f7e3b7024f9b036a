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
from pathlib import Path
from typing import Any

import torch

from hybridremat.files import cache_folder, write_atomic

logger = logging.getLogger(__name__)

# since bags are tried with something in each, 9 kernels on what comes really, 8 losses by chunks, 7 kernels
# by parts; 4 could hold times taken on a busy machine
_VERSION = 10


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
    """Times (ns), workspaces and output sizes (bytes) by kernel signature, and what may be overwritten."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._times: dict[str, int] = {}
        self._temporaries: dict[str, int] = {}
        self._outputs: dict[str, tuple[int, ...]] = {}
        self._results: dict[str, list[Any]] = {}
        self._shared: dict[str, tuple[int, ...]] = {}
        self._in_place: dict[str, bool] = {}
        self._parts: dict[str, int] = {}
        self._changed = False
        if path is not None:
            self._load(path)

    @classmethod
    def for_device(cls, device: str) -> KernelStore:
        """The store of this device on this machine."""
        name = hashlib.sha256(device_description(device).encode()).hexdigest()[:16]
        return cls(cache_folder() / f"kernels-{name}.json")

    def time(self, key: str) -> int | None:
        """Nanoseconds, or None if not known."""
        return self._times.get(key)

    def temporary(self, key: str) -> int | None:
        """Bytes, or None if not known."""
        return self._temporaries.get(key)

    def outputs(self, key: str) -> tuple[int, ...] | None:
        """Bytes of each output's real storage, or None if not known."""
        return self._outputs.get(key)

    def shared(self, key: str) -> tuple[int, ...]:
        """For each output the input whose memory it is, though it is not traced so; −1, or empty, if none."""
        return self._shared.get(key, ())

    def result(self, key: str) -> list[Any] | None:
        """What a kernel returns (``real_results.py``), if it is known and not as traced."""
        return self._results.get(key)

    def in_place(self, key: str) -> bool | None:
        """Whether a kernel may write over an input (``… over 0``: the first one); None if not tried."""
        return self._in_place.get(key)

    def part_workspace(self, key: str) -> int | None:
        """Workspace of a kernel by parts; −1 if its bits are others, None if not tried."""
        return self._parts.get(key)

    def add_part_workspaces(self, tried: dict[str, int]) -> None:
        """Remember what was tried."""
        self._parts.update(tried)
        self._changed |= bool(tried)

    def add_in_place(self, tried: dict[str, bool]) -> None:
        """Remember what was tried."""
        self._in_place.update(tried)
        self._changed |= bool(tried)

    def add_times(self, times: dict[str, int]) -> None:
        """Remember measured times."""
        self._times.update(times)
        self._changed |= bool(times)

    def add_temporaries(self, temporaries: dict[str, int]) -> None:
        """Remember measured workspaces."""
        self._temporaries.update(temporaries)
        self._changed |= bool(temporaries)

    def add_shared(self, shared: dict[str, tuple[int, ...]]) -> None:
        """Remember whose memory outputs are."""
        self._shared.update(shared)
        self._changed |= bool(shared)

    def add_result(self, key: str, result: list[Any]) -> None:
        """Remember what a kernel returns that is not as traced."""
        self._results[key] = result
        self._changed = True

    def add_outputs(self, outputs: dict[str, tuple[int, ...]]) -> None:
        """Remember the sizes of outputs."""
        self._outputs.update(outputs)
        self._changed |= bool(outputs)

    def _load(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text())
            if data["version"] != _VERSION:
                return
            self._times = {str(k): int(v) for k, v in data["times"].items()}
            self._temporaries = {str(k): int(v) for k, v in data["temporaries"].items()}
            self._outputs = {str(k): tuple(map(int, v)) for k, v in data["outputs"].items()}
            self._shared = {str(k): tuple(map(int, v)) for k, v in data["shared"].items()}
            self._results = {str(k): list(v) for k, v in data["results"].items()}
            self._in_place = {str(k): v is True for k, v in data["in place"].items()}
            self._parts = {str(k): int(v) for k, v in data["by parts"].items()}
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
            self._times, self._temporaries, self._outputs = {}, {}, {}
            self._results, self._shared, self._in_place, self._parts = {}, {}, {}, {}
            logger.warning("the kernel figures in %s cannot be read; they are measured again", path)

    def save(self) -> None:
        """Write the file if anything is new. A folder that cannot be written only costs time later."""
        if self._path is None or not self._changed:
            return
        data = {
            "version": _VERSION,
            "times": self._times,
            "temporaries": self._temporaries,
            "outputs": self._outputs,
            "results": self._results,
            "shared": self._shared,
            "in place": self._in_place,
            "by parts": self._parts,
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, json.dumps(data))
        except OSError as error:
            logger.warning("kernel figures could not be kept in %s: %s", self._path.parent, error)
