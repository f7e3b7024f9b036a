"""The frontier as the file of a picture. matplotlib loads here alone.

Figures are made without pyplot, so nothing is registered, and no window or backend of the caller changes.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hybridremat.curve_drawing import draw_curve
from hybridremat.errors import MissingPackageError, PlotError
from hybridremat.graph.whole_files import write_whole
from hybridremat.plan_records import FrontierPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hybridremat.curve import Frontier

SUFFIXES = (".png", ".svg", ".pdf")
# No dates in the files: the same curve is the same file.
_METADATA: dict[str, dict[str, None]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def require_suffix(path: str | Path) -> str:
    """The suffix of a picture's file.

    Raises
    ------
    PlotError
        If it is none of :data:`SUFFIXES`.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise PlotError(f"{str(path)!r} has no suffix of a picture: use {', '.join(SUFFIXES)}")
    return suffix


def plotted(
    curve: Frontier,
    path: str | Path | None,
    *,
    chosen: FrontierPoint | None = None,
    limit: int | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Draw the curve on ``ax`` or a figure of its own, and write the file if there is a path.

    Parameters
    ----------
    chosen
        A point to be marked.
    limit
        Bytes; drawn as a line.

    Raises
    ------
    PlotError, MissingPackageError
        Before anything is drawn.
    """
    suffix = None if path is None else require_suffix(path)
    axes = ax if ax is not None else new_figure().add_subplot()
    draw_curve(axes, curve, chosen, limit)
    figure = cast("Figure", axes.get_figure(root=True))
    if path is not None and suffix is not None:
        write_whole(Path(path), _picture(figure, suffix))
    return figure


def new_figure() -> Figure:
    """An empty figure that nothing else knows of.

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
            "a curve is drawn by matplotlib, which is not installed: pip install 'hybridremat[plots]'. "
            "Without it, to_csv and to_dict give the points."
        ) from error
    figure = Figure(figsize=(8, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _picture(figure: Figure, suffix: str) -> bytes:
    from matplotlib import rc_context

    content = BytesIO()
    with rc_context({"svg.hashsalt": "hybridremat", "svg.fonttype": "none"}):
        figure.savefig(content, format=suffix[1:], dpi=150, metadata=_METADATA[suffix])
    return content.getvalue()
