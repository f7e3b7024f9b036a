"""Plans kept on disk between runs, below the cache folder: found by graph, request and device.

Entries are whole files under the hash of what they depend on. Several processes may read and write at once:
files appear by renaming, and one that vanishes while it is read was removed by another process. The least
recently used entries go when all of them take more than ``HYBRIDREMAT_CACHE_SIZE`` (256 MiB; 0 keeps none).
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
    """The plans in one folder; ``most`` bytes are kept."""

    folder: Path
    most: int

    @classmethod
    def for_settings(cls, settings: Settings) -> PlanCache | None:
        """The user's cache; None if nothing is kept, or the cost model has no lasting name."""
        most = cache_size()
        if not settings.cache or not most or not isinstance(settings.cost_model, str):
            return None
        return cls(cache_folder() / "plans", most)

    def read(self, key: str) -> Plan | None:
        """The plan of that key, if there is one that can be read."""
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
        """Keep a plan. A folder that cannot be written only costs time later."""
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
        for path in self.folder.iterdir():  # remains of a process that was killed while writing count too
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


def plan_key(fingerprint: str, settings: Settings, device: str, *, reused: bool) -> str:
    """Names a plan by all that it depends on.

    Parameters
    ----------
    device
        Kind of device; without meaning where the settings name another one to plan for.
    reused
        Whether options of another input shape will do.
    """
    here = device_description(device) if settings.spec is None else ""
    parts = fingerprint, settings.deciding(), here, reused, SCHEMA, __version__
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
