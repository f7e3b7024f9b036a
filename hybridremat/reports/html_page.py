"""The HTML report of a plan: one file that loads nothing else.

The template, style and scripts in ``page/`` are written into the file with the data that the scripts draw.
The table of decisions and the figures are plain HTML, there without scripts too.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields, is_dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hybridremat.files import write_atomic
from hybridremat.plans.plan_data import PlanData
from hybridremat.reports.html_data import report_data
from hybridremat.reports.html_rows import row_views
from hybridremat.reports.legend import legend
from hybridremat.reports.size_svg import size_charts
from hybridremat.reports.size_tables import size_cells, size_heads
from hybridremat.reports.text import COUNTED, summary
from hybridremat.units import format_bytes, format_share_up, format_time

SCRIPTS = ("text", "steps", "bands", "timeline", "alive", "chain", "frontier", "values", "table", "start")

_BREAKS = re.compile(r"(?<=[._])(?=\D)")  # not between a list of layers and the layer's number


def write_html(plan: PlanData, path: str | Path) -> None:
    """Write the report of a plan; the file appears complete or not at all.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    write_atomic(Path(path), render_html(plan))


def render_html(plan: PlanData) -> str:
    """The report of a plan as the text of one HTML page."""
    parts = plan.parts or (plan,)
    lines = summary_lines(plan)
    return _environment().get_template("report.html.jinja").render(
        plan=plan,
        parts=parts,
        rows=[row_views(part.blocks) for part in parts],
        key_figures=key_figures(plan),
        counted=COUNTED,
        summary=lines,
        terms=legend([name for name, _ in lines]),
        pins=_records(plan.pins),
        data=report_data(plan),
        sizes=_sizes(plan),
        **page_files(),
    )


def _sizes(plan: PlanData) -> dict[str, Any]:
    """What is known of other sizes, as a table and charts; nothing if that is one size."""
    rows = plan.size_rows()
    if len(rows) < 2:
        return {}
    return {"heads": size_heads(rows), "rows": list(size_cells(rows)), "charts": size_charts(rows)}


def page_files() -> dict[str, Markup]:
    """The style and the scripts of the page, in order."""
    return {
        "style": _trusted("report.css"),
        "scripts": Markup("\n").join(_trusted(f"{name}.js") for name in SCRIPTS),
    }


def key_figures(plan: PlanData) -> list[tuple[str, str, str]]:
    """The figures at the top of the page: label, figure, note."""

    def share(size: int) -> str:
        return f"{format_share_up(size, plan.plain_peak)} of plain"

    asked = plan.memory_limit
    limit = [] if asked is None else [("Limit", format_bytes(asked), share(asked))]
    needed = ("With your own code", format_bytes(plan.needed), share(plan.needed))
    beside = [needed] if plan.needed != plan.predicted_peak else []  # reserve, further forwards
    return [
        *limit,
        ("Predicted peak", format_bytes(plan.predicted_peak), share(plan.predicted_peak)),
        *beside,
        ("Plain peak", format_bytes(plan.plain_peak), "without recomputation"),
        ("Least feasible", format_bytes(plan.least_peak), share(plan.least_peak)),
        ("Overhead", f"{plan.overhead:+.1%}", f"time by cost model {plan.cost_model}"),
        *_certified(plan),
        ("Extra flops", f"{plan.extra_flops:+.1%}", "of the plain step's"),
    ]


def _certified(plan: PlanData) -> list[tuple[str, str, str]]:
    """How near the plan is to the best there is, if that was proven."""
    if (gap := plan.optimality_gap) is None:
        return []
    return [("Optimality gap", f"≤ {math.ceil(1000 * gap) / 10:.1f} %", "of the step's time, proven")]


def summary_lines(plan: PlanData) -> list[tuple[str, str]]:
    """The lines of ``print(plan)`` above its table."""
    names, texts = (list(column.cells) for column in summary(plan).columns)
    return [(str(name), str(text)) for name, text in zip(names, texts, strict=True)]


def breakable(name: str) -> Markup:
    """A row's name for HTML: a line break between its two ends, and optional ones within module paths."""
    ends = [Markup("<wbr>").join(_BREAKS.split(end)) for end in name.split(" … ")]
    return Markup(" …<br>").join(ends)


def _records(items: Any) -> list[dict[str, Any]]:
    return [{f.name: getattr(item, f.name) for f in fields(item)} for item in items if is_dataclass(item)]


def _trusted(name: str) -> Markup:
    """A file of this package, not to be escaped."""
    return Markup(files("hybridremat.reports").joinpath("page", name).read_text(encoding="utf-8"))


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("hybridremat.reports", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    environment.filters["bytes"] = format_bytes
    environment.filters["time"] = format_time
    environment.filters["breakable"] = breakable
    return environment
