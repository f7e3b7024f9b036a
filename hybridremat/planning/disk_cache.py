"""Records of one kind in a folder of the cache, each under the hash of what it depends on.

Several processes may read and write at once: files appear by renaming, and may vanish at any time. The least
recently used are removed when all together take too much.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from hybridremat.errors import PlanFormatError
from hybridremat.files import cache_folder, write_atomic
from hybridremat.units import parse_bytes
from hybridremat.version import __version__, solver_version

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIZE = "256MiB"


def cache_key(*parts: object) -> str:
    """The key of a record that depends on ``parts``, on this version and on that of the solver."""
    return hashlib.sha256(repr((*parts, __version__, solver_version())).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of records: its folder, its name in messages, and how to write it as JSON types and read it."""

    folder: str
    what: str
    written: Callable[[T], Any]
    read: Callable[[Any], T]


@dataclass(frozen=True)
class DiskCache(Generic[T]):
    """The records in one folder, whose files take at most ``most`` bytes."""

    kind: Kind[T]
    folder: Path
    most: int

    @classmethod
    def of_user(cls, kind: Kind[T]) -> DiskCache[T] | None:
        """The user's cache, of ``HYBRIDREMAT_CACHE_SIZE``; None if that is 0.

        Raises
        ------
        LimitError
            If the size cannot be read.
        """
        name = "HYBRIDREMAT_CACHE_SIZE"
        most = parse_bytes(os.environ.get(name) or SIZE, name=name)
        return cls(kind, cache_folder() / kind.folder, most) if most else None

    def read(self, key: str) -> T | None:
        """The record under a key, if there is a readable one; it counts as used now."""
        path = self.path(key)
        try:
            content = gzip.decompress(path.read_bytes())
            os.utime(path)
            return self.kind.read(json.loads(content))
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zlib.error, ValueError, PlanFormatError) as error:
            logger.warning("%s in %s cannot be read (%s): made again", self.kind.what, path, error)
            return None

    def write(self, key: str, record: T) -> None:
        """Keep a record; a folder that cannot be written to is logged."""
        packed = gzip.compress(json.dumps(self.kind.written(record)).encode(), mtime=0)
        if len(packed) > self.most:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path(key), packed)
            self._shrink()
        except OSError as error:
            logger.warning("%s could not be kept in %s: %s", self.kind.what, self.folder, error)

    def path(self, key: str) -> Path:
        """Where the record under a key is."""
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
