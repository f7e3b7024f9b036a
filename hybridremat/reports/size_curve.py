"""A step at many sizes: what it needs, and what keeping the limit costs there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridremat.plans.sizes import SizeRow


@dataclass(frozen=True)
class SizeCurve:
    """A step at many sizes, from one capture: what it needs, and what keeping the limit costs there."""

    rows: tuple[SizeRow, ...]

    def __str__(self) -> str:
        from hybridremat.reports.size_tables import size_table
        from hybridremat.reports.text import rendered

        return rendered([size_table(self.rows)])

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {"rows": [row.to_dict() for row in self.rows]}

    def plot(self, path: str | Path) -> None:
        """Draw needed memory and overhead over the size that varies, as ``.png``, ``.svg`` or ``.pdf``.

        Raises
        ------
        PlotError
            If the file has another suffix, or no size varies.
        MissingPackageError
            If matplotlib is not installed.
        OutputError
            If it cannot be written.
        """
        from hybridremat.reports.size_plot import plot_sizes

        plot_sizes(self.rows, path)
