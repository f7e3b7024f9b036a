"""Atomic writes, and the folder of the cache."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hybridremat.errors import OutputError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write under a temporary name and rename: readers see the old file or the new one, both complete.

    A symbolic link stays, and its target is written. A pipe or device (``/dev/null``, ``/dev/stdout``) is
    written to directly: a rename would replace it by a file.

    Raises
    ------
    OutputError
        If it cannot be written; no temporary file is left.
    OSError
        From a pipe or device.
    """
    if is_special(path):
        with path.open("wb") as special:
            special.write(_bytes(content))
        return
    try:
        _replace(path.resolve(), content)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(
            f"{path} cannot be written ({reason}): name a file in a folder that exists and takes files"
        ) from error


def _replace(path: Path, content: str | bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_bytes(content))
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_special(path: Path) -> bool:
    """Whether a path is a device or a pipe: it exists, and is neither a file nor a folder."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def cache_folder() -> Path:
    """The folder of the cache: ``HYBRIDREMAT_CACHE``, or else the platform's cache folder."""
    if named := os.environ.get("HYBRIDREMAT_CACHE"):
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("hybridremat"))
