"""Graphs with published results: their extra time under a budget beside ours.

    python benchmarks/published.py FOLDER [NAME …] [--pages]

FOLDER has checkouts of one or more of https://github.com/utsaslab/monet-schedules,
https://github.com/haoming-codes/moccasin and https://github.com/uwsampl/dtr-prototype; NAME: only instances
whose name contains one of these. Each is planned by :func:`hybridremat.plan_dag`, and its schedule is
replayed here, in the papers' memory model. Rows go to ``data/published.csv`` as they come, the table from
them to docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from generated import Row, days, loads, read_rows, write_part, write_rows
from published_files import Instance, moccasin, monet
from published_logs import dtr

import hybridremat

SCRIPT: Final = "published.py"
ROWS: Final = Path(__file__).with_name("data") / "published.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = (
    *("instance", "ops", "method", "theirs", "their_seconds", "their_bound"),
    *("ours", "bound", "seconds", "load", "date"),
)


def replayed(instance: Instance, steps: Sequence[int]) -> int:
    """The most bytes of a schedule: an output is there until the last op that reads this version has run."""
    makers: dict[int, list[int]] = {}
    for maker, reader in instance.edges:
        makers.setdefault(reader, []).append(maker)
    last, latest = [*range(len(steps))], dict[int, int]()
    for now, op in enumerate(steps):
        for maker in makers.get(op, ()):
            last[latest[maker]] = now
        latest[op] = now
    size = dict(zip(instance.ops, instance.bytes, strict=True))
    changes = [0] * (len(steps) + 1)
    for now, op in enumerate(steps):
        changes[now] += size[op]
        changes[last[now] + 1] -= size[op]
    most = there = 0
    for change in changes:
        there += change
        most = max(most, there)
    return most


def checked(instance: Instance, plan: hybridremat.DagPlan) -> float:
    """The extra time of a plan as a share of each op once, by what the instance says.

    Raises
    ------
    RuntimeError
        If its schedule does not run all ops, or takes more than the budget.
    """
    budget = instance.budget
    if isinstance(budget, str):
        budget = replayed(instance, instance.ops) * int(budget.rstrip("%")) // 100
    if {*plan.steps} != {*instance.ops} or replayed(instance, plan.steps) > budget:
        raise RuntimeError(f"{instance.name}: {plan}")
    time = dict(zip(instance.ops, instance.times, strict=True))
    return share_of(instance, sum(time[op] for op in plan.steps))


def share_of(instance: Instance, time: int) -> float:
    """Of a time in which each op runs, what is extra as a share of each op once."""
    time_of = dict(zip(instance.ops, instance.times, strict=True))
    further = sum(time_of[op] for op in instance.further)
    return (time - further) / (sum(instance.times) - further) - 1


def measured(instance: Instance) -> Row:
    """The row of one instance; raises as :func:`checked`."""
    load, started = os.getloadavg()[0], time.process_time()
    theirs = instance.theirs
    row: Row = {"instance": instance.name, "ops": len(instance.ops)}
    if theirs is not None:
        figures = (theirs.overhead, theirs.seconds, theirs.bound)
        row |= dict(zip(("theirs", "their_seconds", "their_bound"), map(_text, figures), strict=True))
        row["method"] = theirs.method
    try:
        plan = hybridremat.plan_dag(
            instance.ops, instance.edges, instance.bytes, instance.times, instance.budget,
            backward=instance.backward, certify=bool(instance.backward), progress=False,
        )  # fmt: skip
    except hybridremat.InfeasibleLimitError:
        row["ours"] = ""
    else:
        row["ours"] = _text(checked(instance, plan))
        row["bound"] = _text(share_of(instance, plan.bound))
    row["seconds"] = round(time.process_time() - started, 1)
    return row | {"load": round(load, 1), "date": datetime.now(UTC).date().isoformat()}


def _text(share: float | None) -> str:
    return "" if share is None else f"{share:.6f}"


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    held = [row for row in rows if row["theirs"]]
    return "\n".join((described(rows, len(held), sum(map(slower, held))), "", *table_of(in_order(rows))))


def in_order(rows: Sequence[Row]) -> list[Row]:
    """The rows by name, and by the numbers in it."""

    def key(row: Row) -> str:
        return re.sub(r"[\d.]+", lambda number: f"{float(number[0]):09.2f}", row["instance"])

    return sorted(rows, key=key)


def slower(row: Row) -> bool:
    """Whether ours is slower than what was published, as far as that was printed, or nothing was found."""
    places = 3 if row["method"] == "Moccasin" else 6
    return not row["ours"] or round(float(row["ours"]), places) > float(row["theirs"])


def described(rows: Sequence[Row], held: int, worse: int) -> str:
    """What stands above the table."""
    return (
        f"`python benchmarks/published.py FOLDER`: extra time in percent of each op once, {days(rows)}, "
        f"one core with {loads(rows)}, {len(rows)} instances of those in the files. Of {held} with a "
        f"published result, ours is slower than {worse}. *Bound*: no schedule "
        "is faster; theirs is what Gurobi proved in up to 24 hours on 12 threads. *CPU s*: plan and "
        "bound. Memory is counted as in the papers, and each schedule is replayed so. Moccasin's authors "
        "print one decimal. DTR, which decides while a step runs, is what its authors' simulator says of "
        "their own heuristic on the same log."
    )


def table_of(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield "| instance | ops | theirs | their bound | their time | ours | our bound | CPU s |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        found = _percent(row["theirs"]) if row["theirs"] else "out of memory"
        theirs = f"{row['method']} {found}" if row["method"] else "–"
        spent = f"{float(row['their_seconds']):.0f} s" if row["their_seconds"] else "–"
        cells = [row["instance"], row["ops"], theirs, _percent(row["their_bound"]), spent]
        ours = _percent(row["ours"]) if row["ours"] else "nothing found"
        yield "| " + " | ".join((*cells, ours, _percent(row["bound"]), row["seconds"])) + " |"


def _percent(share: str) -> str:
    return f"{100 * float(share):.3f}" if share else "–"


def main() -> None:
    """Measure the instances of a folder and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="where the published files are")
    parser.add_argument("names", nargs="*", help="parts of instances' names; else all")
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    options = parser.parse_args()
    rows = {row["instance"]: row for row in read_rows(ROWS)}
    if not options.pages:
        if options.folder is None or not options.folder.is_dir():
            parser.error("give the folder of the published files")
        for instance in (each for read in (monet, moccasin, dtr) for each in read(options.folder)):
            if not options.names or any(name in instance.name for name in options.names):
                rows[instance.name] = measured(instance)
                write_rows(ROWS, COLUMNS, [*rows.values()])
                print(instance.name, "measured", file=sys.stderr)
    write_part(PAGE, SCRIPT, part(read_rows(ROWS)))


if __name__ == "__main__":
    main()
