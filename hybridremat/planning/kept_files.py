"""Files of one kind in a folder of the cache, each under the hash of what its content depends on.

Several processes may read and write at once: files appear by renaming, and may vanish at any time. The least
recently used are removed when all together take too much.
"""

from __future__ import annotations

import gzip
import logging
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

from hybridremat.files import write_atomic
from hybridremat.units import parse_bytes

logger = logging.getLogger(__name__)

SIZE = "256MiB"


def cache_size() -> int:
    """Most bytes of kept files of a kind: ``HYBRIDREMAT_CACHE_SIZE``.

    Raises
    ------
    LimitError
        If it cannot be read.
    """
    return parse_bytes(os.environ.get("HYBRIDREMAT_CACHE_SIZE") or SIZE, name="HYBRIDREMAT_CACHE_SIZE")


@dataclass(frozen=True)
class KeptFiles:
    """The files in one folder, at most ``most`` bytes; ``what`` names their content in messages."""

    folder: Path
    most: int
    what: str

    def read(self, key: str) -> bytes | None:
        """The content under a key, if there is a readable one; it counts as used now."""
        path = self.path(key)
        try:
            content = gzip.decompress(path.read_bytes())
            os.utime(path)
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zlib.error) as error:
            self.refuse(key, error)
            return None
        return content

    def refuse(self, key: str, error: Exception) -> None:
        """Tell that what is kept cannot be read."""
        logger.warning("%s in %s cannot be read (%s): made again", self.what, self.path(key), error)

    def write(self, key: str, content: bytes) -> None:
        """Keep a content; a folder that cannot be written to is logged."""
        packed = gzip.compress(content, mtime=0)
        if len(packed) > self.most:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path(key), packed)
            self._shrink()
        except OSError as error:
            logger.warning("%s could not be kept in %s: %s", self.what, self.folder, error)

    def path(self, key: str) -> Path:
        """Where the content under a key is."""
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
