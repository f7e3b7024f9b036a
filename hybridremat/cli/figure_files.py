"""The files that a command writes beside its text: pictures by their suffix, rows and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hybridremat.cli.output import require_writable
from hybridremat.errors import PlotError
from hybridremat.reports.figures import SUFFIXES, new_figure

DATA = (".csv", ".json")


def checked_files(names: Sequence[str] | None) -> list[Path]:
    """The paths of ``-o``, checked before seconds of planning are spent for them.

    Raises
    ------
    PlotError, MissingPackageError, OSError
        If a file cannot be written as its suffix says.
    """
    paths = [Path(name) for name in names or ()]
    for path in paths:
        if path.suffix.lower() not in (*SUFFIXES, *DATA):
            known = ", ".join((*SUFFIXES, *DATA))
            raise PlotError(f"-o {path}: the suffix says what to write; use one of {known}")
        if path.suffix.lower() in SUFFIXES:
            new_figure()
        require_writable(str(path))
    return paths
