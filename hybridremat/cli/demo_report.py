"""What ``demo --quick`` leaves behind: the report of its plan and a picture of the frontier."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path

from hybridremat.cli.output import require_writable
from hybridremat.errors import OutputError
from hybridremat.files import write_atomic
from hybridremat.integrations.loop_report import frontier_figure
from hybridremat.planning.plan import Plan
from hybridremat.reports.figures import picture

REPORT, PICTURE = "plan.html", "frontier.png"


def make_folder(text: str) -> Path:
    """The folder for both files, made if there is none.

    Raises
    ------
    OutputError
        If it cannot be made, or takes no files.
    """
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise OutputError(f"-o {text}: no folder can be made there ({reason}); name another one") from error
    require_writable(str(folder / REPORT))
    return folder


def write_report(plan: Plan, folder: Path) -> list[Path]:
    """Write the report, and with matplotlib the picture; returns the files that there are."""
    report, image = folder / REPORT, folder / PICTURE
    plan.to_html(report)
    figure = frontier_figure(plan)
    if figure is None:
        return [report]
    write_atomic(image, picture(figure, image.suffix))
    return [report, image]


def has_display() -> bool:
    """Whether somebody sits in front of a terminal with a display, so that a browser may open."""
    named = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return sys.stdout.isatty() and (named or sys.platform in ("darwin", "win32"))


def open_report(path: Path) -> None:
    """Open a report in the browser, where there is a display."""
    if has_display():
        webbrowser.open(path.resolve().as_uri())
