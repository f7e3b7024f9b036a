"""The frontiers of the eight reference models beside the recorded ones, and their least peaks by lever.

    python benchmarks/compare_marks.py [MODEL …] [--pages]

Extra flops in percent (cost model ``flops``) at a share of plain eager training's recorded peak; each model
in a process of its own, one thread, as the recorded figures were made. Least peaks are those of the default,
with ``rewrites="none"``, and where the loss alone is returned, with gradients at the end and in the backward.
Rows go to ``data/frontiers.csv``, the tables from them to docs/benchmarks.md; ``--pages`` does only that.
Exits with 1 if a frontier measured now is more than one point above its record, or its plans take two points
of time more than those without rewrites.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from differences import differences
from generated import (
    Row,
    circumstances,
    cpu_seconds,
    days,
    loads,
    read_rows,
    versions,
    write_part,
)
from marks import DATA, Mark, compare, extra_at, per_layer_checkpoint, recorded_frontier
from reference import PAGE, made, measured_again, options_of, title

import hybridremat

SCRIPT: Final = "compare_marks.py"
FLOORS: Final = f"{SCRIPT}, least peaks"
ROWS: Final = DATA / "frontiers.csv"
SHARES: Final = (70, 60, 55, 50, 45, 40, 35, 30, 25)
COLUMNS: Final = (
    *("model", "extra", "per_layer", "worst", "worst_at", "planning"),
    *("least", "least_none", "least_loss", "least_in_backward"),
    *("above_none", "above_none_at", "below_none", "below_none_at", "load", "date", "torch"),
)
LEVERS: Final = {
    "least_none": {"rewrites": "none"},
    "least": {},
    "least_loss": {"outputs": "loss"},
    "least_in_backward": {"outputs": "loss", "gradients": "in_backward"},
}
"""Columns of least peaks, and what is asked for."""

ABOVE_RECORD: Final = 1.0
ABOVE_NONE: Final = 2.0
"""Points above the record, and above the frontier without rewrites, that a frontier may be."""


def measured(name: str) -> list[Row]:
    """The row of one model, planned in this process."""
    load, started = os.getloadavg()[0], cpu_seconds()
    model, batch = made(name)
    eager, recorded = recorded_frontier(name)
    found = frontier(model, batch)
    seconds = cpu_seconds() - started
    points = [Mark(100 * each.peak / eager, 100 * each.extra_flops) for each in found.points]
    result = compare(points, recorded)
    others = {how: frontier(model, batch, **LEVERS[how]) for how in LEVERS if LEVERS[how]}
    leasts = {how: round(100 * each.least.peak / eager, 2) for how, each in others.items()}
    row = {
        "model": name,
        "extra": json.dumps({share: rounded(extra_at(points, share)) for share in SHARES}),
        "per_layer": json.dumps([rounded(extra_at(points, m.peak)) for m in per_layer_checkpoint(name)]),
        "worst": round(result.worst, 3),
        "worst_at": result.at,
        "planning": round(seconds, 1),
        "least": round(result.least, 2),
    }
    return [{**row, **leasts, **beside_none(found, others["least_none"], eager), **circumstances(load)}]


def frontier(model: Any, batch: dict[str, Any], **how: Any) -> hybridremat.Frontier:
    """A frontier by flops."""
    return hybridremat.frontier(model, kwargs=batch, cost_model="flops", progress=False, **how)


def rounded(extra: float | None) -> float | None:
    """Percents of extra flops as they are kept."""
    return None if extra is None else round(extra, 2)


def beside_none(found: hybridremat.Frontier, none: hybridremat.Frontier, eager: int) -> Row:
    """The most points of time above and below the frontier without rewrites, and at what shares of eager."""
    between = differences(found, none)
    row: Row = {}
    for name, most in (("above_none", max), ("below_none", min)):
        each = most(between, key=lambda one: one.points)
        row |= {name: round(each.points, 3), f"{name}_at": round(100 * each.peak / eager, 1)}
    return row


def frontiers_part(rows: Sequence[Row]) -> str:
    """The tables of frontiers."""
    return "\n".join((described(rows), "", *table(rows), "", *checkpoint_table(rows)))


def circumstances_of(rows: Sequence[Row]) -> str:
    """How rows were measured."""
    return (
        f"`python benchmarks/compare_marks.py` (`make marks`): {days(rows)}, {versions(rows)}, one thread, "
        f"2 cores with {loads(rows)}, cost model `flops`."
    )


def described(rows: Sequence[Row]) -> str:
    """What stands above the table of frontiers."""
    return (
        f"{circumstances_of(rows)} Extra flops in percent, ours / recorded, at a share of plain eager "
        "training's peak, and the least peak in percent of it. *Worst excess*: the most points of extra "
        "flops above the record at any recorded share. *Planning*: CPU seconds until the frontier is there, "
        "capture included."
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of frontiers beside the recorded ones."""
    shares = " | ".join(f"{share} %" for share in SHARES)
    yield f"| model | {shares} | least peak | worst excess | planning |"
    yield "|" + "---|" * (len(SHARES) + 4)
    for row in rows:
        _, recorded = recorded_frontier(row["model"])
        ours = json.loads(row["extra"])
        cells = [pair(ours[str(share)], extra_at(recorded, share)) for share in SHARES]
        least = f"{float(row['least']):.2f} / {min(mark.peak for mark in recorded):.2f}"
        seconds = f"{float(row['planning']):.0f} s"
        yield f"| {' | '.join((title(row['model']), *cells, least, excess(row), seconds))} |"


def pair(ours: float | None, theirs: float | None) -> str:
    """Two figures of extra flops, either of which may be out of reach."""
    if ours is None and theirs is None:
        return "–"
    return " / ".join("–" if extra is None else f"{extra:.1f}" for extra in (ours, theirs))


def excess(row: Row) -> str:
    """The worst excess over the record, if there is any."""
    worst = float(row["worst"])
    return f"{worst:.2f} at {float(row['worst_at']):.1f} %" if worst >= 0.005 else "0"


def checkpoint_table(rows: Sequence[Row]) -> Iterator[str]:
    """What checkpointing each layer takes, and plans for its memory."""
    yield "At the memory of checkpointing every layer (`benchmarks/data/per_layer_checkpoint.csv`):"
    yield ""
    yield "| model | checkpointed | peak | extra flops, checkpointed | planned |"
    yield "|---|---|---|---|---|"
    recorded = read_rows(DATA / "per_layer_checkpoint.csv")
    for row in rows:
        theirs = [each for each in recorded if each["model"] == row["model"]]
        for each, ours in zip(theirs, json.loads(row["per_layer"]), strict=True):
            figures = [f"{each['peak_percent']} %", f"{each['extra_flops_percent']} %"]
            planned = "–" if ours is None else f"{ours:.1f} %"
            yield f"| {' | '.join((title(row['model']), each['how'], *figures, planned))} |"


def floors_part(rows: Sequence[Row]) -> str:
    """The table of least peaks."""
    return "\n".join((described_floors(rows), "", *floors_table(rows), "", beside_none_text(rows)))


def described_floors(rows: Sequence[Row]) -> str:
    """What stands above the table of least peaks."""
    return (
        f"{circumstances_of(rows)} Least peaks in percent of plain eager training's: without "
        '[ops in place](method.md#ops-in-place) and [by parts](method.md#ops-by-parts) (`rewrites="none"`), '
        'with both, as a user gets them, with `outputs="loss"` on top, and with `gradients="in_backward"` on '
        "top of that (no workspace of an optimizer)."
    )


def floors_table(rows: Sequence[Row]) -> Iterator[str]:
    """The least peak with each lever."""
    yield '| model | `rewrites="none"` | default | loss alone | in the backward |'
    yield "|---|---|---|---|---|"
    for row in rows:
        yield f"| {' | '.join((title(row['model']), *(f'{float(row[how]):.1f} %' for how in LEVERS)))} |"


def beside_none_text(rows: Sequence[Row]) -> str:
    """How far frontiers are from those without rewrites, in words."""
    above = max(rows, key=lambda row: float(row["above_none"]))
    below = min(rows, key=lambda row: float(row["below_none"]))
    most = math.ceil(100 * max(0.0, float(above["above_none"]))) / 100
    slower = f"more than {most:.2f} points of time above it" if most else "slower"
    return (
        f'At no limit that `rewrites="none"` reaches is the default frontier {slower}, and it is up to '
        f"{-float(below['below_none']):.1f} points of time below ({title(below['model'])} at "
        f"{float(below['below_none_at']):.1f} %)."
    )


def worse(row: Row) -> Iterator[str]:
    """What has become worse than it may, in words."""
    recorded = min(mark.peak for mark in recorded_frontier(row["model"])[1])
    for what, points, most in (
        ("extra flops above the record", float(row["worst"]), ABOVE_RECORD),
        ("least peak above the recorded one", float(row["least"]) - recorded, ABOVE_RECORD),
        ('time above rewrites="none"', float(row["above_none"]), ABOVE_NONE),
    ):
        if points > most:
            yield f"{row['model']}: {what} by {points:.2f} points"


def main() -> int:
    """Measure the models asked for, write the page, and say what has become worse."""
    options = options_of(__doc__)
    if options.here:
        print(json.dumps(measured(options.here)))
        return 0
    rows = measured_again(__file__, ROWS, COLUMNS, options.names)
    write_part(PAGE, SCRIPT, frontiers_part(rows))
    write_part(PAGE, FLOORS, floors_part(rows))
    found = [row for row in rows if row["model"] in options.names]
    for line in (*table(found), "", *floors_table(found)) if found else ():
        print(line)
    failures = [line for row in found for line in worse(row)]
    for line in failures:
        print(line, file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
