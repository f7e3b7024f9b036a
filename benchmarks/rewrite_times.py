"""Times of steps with ops in place and by parts, predicted and measured, where memory is shortest.

    python benchmarks/rewrite_times.py [MODEL …] [--pages]

Extra time of a reference model's step at the least peak of ``rewrites="none"`` + 3 %, without and with
rewrites, and at the least peak where it returns its loss alone + 3 %; beside the planned step at 100 %, by
``cost_model="profile"``. CPU time of one thread, turn and turn about in one process that keeps its memory, as
``step_times.py`` does it. Rows go to ``data/rewrite_times.csv`` as they come, what is missing without MODEL,
and those of MODEL anew; the table from them to docs/benchmarks.md; ``--pages`` does only that.
Rows without a load are those of 2026-11-22, taken over from the page as it stood.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Final

from generated import Row, circumstances, days, gone_on, loads, older_day, task_options, versions, write_part
from marks import DATA, recorded_frontier, recorded_models
from reference import PAGE, made, title
from step_times import KEPT, MEMORY, WARM_UP, Step, timed_step

import hybridremat

SCRIPT: Final = "rewrite_times.py"
ROWS: Final = DATA / "rewrite_times.csv"
COLUMNS: Final = ("model", "way", "limit", "predicted", "measured", "load", "date", "torch")
ROUNDS: Final = 15
OLDER: Final = (
    " Rows of an earlier day say so: five pairs of steps, and times that did not yet count "
    "[what comes from memory](method.md#times)."
)
WHOLE, WITHOUT, WITH, LOSS = "whole", "without", "with", "loss alone"


def prepared(model: Any, batch: dict[str, Any]) -> Iterator[tuple[str, int, float, Step]]:
    """Each way to train a model: its name, limit in bytes, predicted overhead, and step."""
    how: dict[str, Any] = {"kwargs": batch, "progress": False}
    none = hybridremat.frontier(model, rewrites="none", **how)
    alone = hybridremat.frontier(model, outputs="loss", **how)
    low, lower = (103 * found.least.peak // 100 for found in (none, alone))
    settings: dict[str, dict[str, Any]] = {WITHOUT: {"rewrites": "none"}, LOSS: {"outputs": "loss"}}
    for way, limit in {WHOLE: none.plain_peak, WITHOUT: low, WITH: low, LOSS: lower}.items():
        planned = copy.deepcopy(model)
        hybridremat.wrap(planned, memory_limit=limit, **how, **settings.get(way, {}))
        yield way, limit, hybridremat.get_plan(planned).overhead, timed_step(planned, batch)


def measured(name: str) -> list[Row]:
    """The rows of one model, made in this process."""
    load = os.getloadavg()[0]
    ways = list(prepared(*made(name)))
    seconds: dict[str, list[float]] = {way: [] for way, *_ in ways}
    for _ in range(WARM_UP + ROUNDS):
        for way, _, _, step in ways:
            seconds[way].append(step()[0])
    whole = seconds.pop(WHOLE)[WARM_UP:]
    ratios = {
        way: statistics.median(one / other for one, other in zip(each[WARM_UP:], whole, strict=True))
        for way, each in seconds.items()
    }
    return [
        {
            "model": name,
            "way": way,
            "limit": round(100 * limit / recorded_frontier(name)[0], 1),
            "predicted": round(100 * overhead, 2),
            "measured": round(100 * (ratios[way] - 1), 2),
            **circumstances(load),
        }
        for way, limit, overhead, _ in ways
        if way in ratios
    ]


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    new = [row for row in rows if row["load"]]
    return (
        f"`python benchmarks/rewrite_times.py`: {days(new)}, {versions(new)}, one thread, 2 cores with "
        f"{loads(new)}, cost model `profile`, CPU time, medians of {ROUNDS} rounds beside the planned step "
        "at 100 %, in a process that keeps its memory. Predicted and measured extra time of a step at the "
        'least peak of `rewrites="none"` + 3 %, without and with rewrites, and at the least peak with the '
        f"loss alone + 3 %; limits in percent of plain eager's peak.{'' if len(new) == len(rows) else OLDER}"
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield "| model | at | without | with | at | with, the loss alone |"
    yield "|---|---|---|---|---|---|"
    by_way = {(row["model"], row["way"]): row for row in rows}
    for name in (each for each in recorded_models() if (each, WITH) in by_way):
        without, rewritten, loss = (by_way[name, way] for way in (WITHOUT, WITH, LOSS))
        limits = [f"{float(row['limit']):.1f} %" for row in (without, loss)]
        times = [
            f"{float(row['predicted']):.0f} %, {float(row['measured']):.0f} %"
            for row in (without, rewritten, loss)
        ]
        model = title(name) + older_day(rewritten)
        yield f"| {model} | {limits[0]} | {times[0]} | {times[1]} | {limits[1]} | {times[2]} |"


def main() -> None:
    """Measure what is asked for, write the page."""
    options = task_options(__doc__, recorded_models())
    if options.here:
        print(json.dumps(measured(*options.here)))
        return
    tasks = [(name,) for name in options.names]
    rows = gone_on(__file__, ROWS, COLUMNS, tasks, again=options.again, environment=MEMORY[KEPT])
    write_part(PAGE, SCRIPT, part(rows))


if __name__ == "__main__":
    main()
