"""Where a command's results go: the standard output, or a file that can be written, known beforehand."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from hybridremat.errors import OutputError
from hybridremat.graph.whole_files import is_special


def print_json(data: object) -> None:
    """Write JSON, and nothing else, to the standard output."""
    sys.stdout.write(json.dumps(data, indent=1) + "\n")


def require_writable(text: str | None, *, option: str = "-o") -> None:
    """Refuse a place in which no file can be written, before seconds of planning are spent for it.

    Raises
    ------
    OutputError
        If the folder is not there or takes no file, or ``text`` names a folder.
    """
    if text is None:
        return
    path = Path(text)
    if is_special(path):
        return
    if path.is_symlink():
        path = path.resolve()
    if path.is_dir():
        raise OutputError(f"{option} {text}: that is a folder; name a file in it")
    if not path.parent.is_dir():
        raise OutputError(f"{option} {text}: there is no folder {path.parent}; make it first (mkdir -p)")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"{option} {text}: no file can be written in {path.parent} ({reason})") from error
