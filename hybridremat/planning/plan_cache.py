"""Plans on disk, found again by graph, request and device.

Each file is named by the hash of what the plan depends on. Several processes may read and write at once:
files appear by renaming, and may vanish at any time. The least recently used are removed when all together
take more than ``HYBRIDREMAT_CACHE_SIZE`` (256 MiB; 0 keeps none).
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

from hybridremat.errors import PlanFormatError
from hybridremat.files import cache_folder, write_atomic
from hybridremat.graph.costs.kernel_store import device_description
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import Settings
from hybridremat.plans.codec import SCHEMA, plan_from_dict, plan_to_dict
from hybridremat.units import parse_bytes
from hybridremat.version import __version__

logger = logging.getLogger(__name__)

SIZE = "256MiB"


def cache_size() -> int:
    """Most bytes of kept plans: ``HYBRIDREMAT_CACHE_SIZE``.

    Raises
    ------
    LimitError
        If it cannot be read.
    """
    return parse_bytes(os.environ.get("HYBRIDREMAT_CACHE_SIZE") or SIZE, name="HYBRIDREMAT_CACHE_SIZE")


@dataclass(frozen=True)
class PlanCache:
    """The plans in one folder, at most ``most`` bytes."""

    folder: Path
    most: int

    @classmethod
    def for_settings(cls, settings: Settings) -> PlanCache | None:
        """The user's cache; None if it is off, or the cost model is an object without a name."""
        most = cache_size()
        if not settings.cache or not most or not isinstance(settings.cost_model, str):
            return None
        return cls(cache_folder() / "plans", most)

    def read(self, key: str) -> Plan | None:
        """The plan of a key, if there is a readable one."""
        path = self._path(key)
        try:
            plan = plan_from_dict(json.loads(gzip.decompress(path.read_bytes())), Plan)
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, EOFError, ValueError, zlib.error, PlanFormatError) as error:
            logger.warning("the kept plan %s cannot be read (%s); it is made again", path, error)
            return None
        return plan

    def write(self, key: str, plan: Plan) -> None:
        """Write a plan; a folder that cannot be written to is logged."""
        content = gzip.compress(json.dumps(plan_to_dict(plan)).encode(), mtime=0)
        if len(content) > self.most:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path(key), content)
            self._shrink()
        except OSError as error:
            logger.warning("the plan could not be kept in %s: %s", self.folder, error)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.json.gz"

    def _shrink(self) -> None:
        entries = []
        for path in self.folder.iterdir():  # partial files of killed processes count too
            try:
                found = path.stat()
            except FileNotFoundError:
                continue
            entries.append((found.st_mtime_ns, found.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= self.most:
                return
            path.unlink(missing_ok=True)
            total -= size


def _compiler(settings: Settings) -> str:
    """What the code of a compiled plan depends on beside the plan."""
    if settings.compiler == "eager":
        return ""
    from hybridremat.graph.private_inductor import compiler_settings  # takes a second

    return compiler_settings()


def plan_key(fingerprint: str, settings: Settings, device: str, *, reused: bool) -> str:
    """The key of a plan: a hash of all that it depends on.

    ``device`` is the kind of device; with a device spec in the settings, what is here does not matter but for
    torch, which captured the graph. ``reused`` says whether options of another input shape may be in it.
    """
    here = device_description(device) if settings.spec is None else torch.__version__
    parts = fingerprint, settings.deciding(), here, reused, SCHEMA, __version__, _compiler(settings)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
