"""Figures, and the files that they are written to. Only this module loads matplotlib.

Figures are made without pyplot, so no window opens and the caller's backend stays.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from hybridremat.errors import MissingPackageError, PlotError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")
# No dates in the files: the same frontier gives the same file.
_METADATA: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}

BLUE, ORANGE, GREEN, VERMILION, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"


def require_suffix(path: str | Path) -> str:
    """The suffix of a picture's file, in lower case.

    Raises
    ------
    PlotError
        If it is none of :data:`SUFFIXES`.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise PlotError(f"{str(path)!r} has no suffix of a picture: use {', '.join(SUFFIXES)}")
    return suffix


def new_figure() -> Figure:
    """An empty figure without pyplot.

    Raises
    ------
    MissingPackageError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "plots need matplotlib, which is not installed: pip install 'hybridremat[plots]'. "
            "Without it, to_csv and to_dict give the points."
        ) from error
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def picture(figure: Figure, suffix: str) -> bytes:
    """A figure as the content of a file."""
    from matplotlib import rc_context

    content = BytesIO()
    with rc_context({"svg.hashsalt": "hybridremat", "svg.fonttype": "none"}):
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=_METADATA[suffix])
    return content.getvalue()
