"""What moves to host memory are worth on devices that are not here, beside others' ways and a bound.

    python benchmarks/offload.py [--models WORD …] [--links GB …] [--limits PERCENT …] [--keep FOLDER]
                                 [--pages]

Models without memory (``meta``), bfloat16, one training step by the rooflines of a device spec, one thread, a
process for each model. Links are what is planned with, in GB a second each way: of rates that are measured
that is 0.85 (``PLANNED`` in ``planning/moving.py``), so that a link of 29.4 stands at 25. A copy takes 10 µs
beside its bytes, both ways go at one time, and host memory has no limit. All links and limits of a model are
planned from one capture; ``--keep`` keeps it in a folder for later links and limits. Rows go to
``data/offload.csv``, the tables from them to docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from generated import Row, circumstances, in_a_process, read_rows, write_part, write_rows
from offload_models import ALL_LINKS, LEAST, LIMITS, MODELS, PEERS
from offload_table import part, place

if TYPE_CHECKING:
    from hybridremat.planning.step_frontier import StepFrontier
    from hybridremat.sequence.pool import SchedulePoint

SCRIPT: Final = "offload.py"
ROWS: Final = Path(__file__).with_name("data") / "offload.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = (
    *("model", "link", "limit", "percent", "recomputed", "theirs", "ours", "bound", "moved", "seconds"),
    *("alone", "capture", "load", "date", "torch"),
)


def captured(title: str, keep: str) -> tuple[StepFrontier, float]:
    """The schedules of a step before a limit is known, and the seconds that they took; perhaps kept."""
    kept = Path(keep) / f"{title.replace(' ', '_')}.pickle" if keep else None
    if kept is not None and kept.exists():
        found: tuple[StepFrontier, float] = pickle.loads(kept.read_bytes())  # noqa: S301, what this script wrote
        return found
    started = time.perf_counter()
    found = planned(title), time.perf_counter() - started
    if kept is not None:
        kept.write_bytes(pickle.dumps(found))
    return found


def planned(title: str) -> StepFrontier:
    """A step captured, its blocks solved and composed."""
    import torch

    from hybridremat.planning.settings import Settings
    from hybridremat.planning.step_frontier import StepFrontier
    from hybridremat.runtime.prepare import model_frontier
    from hybridremat.zoo.models import reference_model

    torch.set_num_threads(1)
    name, changes, device, _ = MODELS[title]
    with torch.device("meta"):
        model, batch = reference_model(name, changes={**changes, "dtype": "bfloat16"})
    settings = Settings(device_spec=device, offload="host", workers=1)
    found = model_frontier(model, (), batch, settings, progress=False)[0]
    assert isinstance(found, StepFrontier)
    return found


def measured(title: str, links: Sequence[float], limits: Sequence[int], keep: str) -> Iterator[Row]:
    """The rows of one model, planned in this process."""
    from hybridremat.sequence.offload.link import Link

    step, capture = captured(title, keep)
    bare = replace(step, judge=replace(step.judge, link=None, host_limit=None))
    for rate in links:
        judge = replace(step.judge, link=Link(rate * 1e9, rate * 1e9), host_limit=None)
        for row in of_link(replace(step, judge=judge), bare, limits):
            yield {"model": title, "link": rate, "capture": round(capture), **row}


def of_link(step: StepFrontier, bare: StepFrontier, limits: Sequence[int]) -> Iterator[Row]:
    """The rows of one link: of each limit, others' ways at what they need, the least with and without."""
    plain = step.plain.peak
    for percent in limits:
        yield {"limit": f"{percent} %", **under(step, bare, percent * plain // 100)}
    for name in PEERS:
        point = theirs(step, name)
        yield {"limit": name, **under(step, bare, point.needs), "theirs": shown(step, point)}
    alone = round(100 * bare.least_composed.needs / plain, 2)
    yield {"limit": LEAST, **under(step, bare, step.least().needs), "alone": alone}


def under(step: StepFrontier, bare: StepFrontier, limit: int) -> Row:
    """What plans take under a limit, with moves and without, in percent of the plain step's time."""
    from hybridremat.errors import InfeasibleLimitError
    from hybridremat.sequence.bounds.certificate import QUICK
    from hybridremat.sequence.offload.bound import offload_bound

    row: Row = {"percent": round(100 * limit / step.plain.peak, 2), **circumstances(os.getloadavg()[0])}
    if limit >= bare.least_composed.needs:
        row["recomputed"] = shown(bare, bare.choose(limit, None))
    started = time.process_time()
    try:
        ours = step.choose(limit, None)
    except InfeasibleLimitError:
        return row
    row["seconds"] = round(time.process_time() - started, 1)
    row["ours"] = shown(step, ours)
    row["moved"] = round(sum(step.graph.values[each.value].bytes for each in ours.schedule.moves) / 2**30, 2)
    unmoved = replace(ours.schedule, moves=())
    row["bound"] = round(100 * offload_bound(step.judge, limit, unmoved, QUICK) / step.plain.time - 100, 2)
    return row


def theirs(step: StepFrontier, name: str) -> SchedulePoint:
    """The least that one of others' ways needs."""
    from hybridremat.planning.planner import compose
    from hybridremat.sequence.search import no_progress
    from hybridremat.sequence.strategies import STRATEGIES, Strategy

    strategy = STRATEGIES[name]
    assert isinstance(strategy, Strategy)
    few = [
        replace(each, option_sets=tuple(map(strategy.restrict, each.option_sets))) for each in step.chains
    ]
    return compose(few, step.judge, no_progress, strategy).points[0]


def shown(step: StepFrontier, point: SchedulePoint) -> float:
    """The time that a schedule takes more than the plain step, in percent."""
    return round(100 * step.overhead(point), 2)


def main() -> None:
    """Plan the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", help="those whose titles hold one of these words; else all")
    parser.add_argument("--links", nargs="*", type=float, help=f"as {ALL_LINKS}; else those of the table")
    parser.add_argument("--limits", nargs="*", type=int, default=LIMITS, help="in percent of the plain peak")
    parser.add_argument("--keep", default="", help="a folder for what is captured")
    parser.add_argument("--pages", action="store_true", help="only write the page from the rows")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        found = measured(options.here, options.links, options.limits, options.keep)
        print(json.dumps([*found]))
        return
    wanted = [name for name in MODELS if not options.models or any(word in name for word in options.models)]
    for name in [] if options.pages else wanted:
        links = options.links or MODELS[name][3]
        given = ("--links", *map(str, links), "--limits", *map(str, options.limits), "--keep", options.keep)
        new = [row | {"link": str(row["link"])} for row in in_a_process(__file__, "--here", name, *given)]
        kept = {place(row): row for row in read_rows(ROWS)} | {place(row): row for row in new}
        write_rows(ROWS, COLUMNS, [kept[each] for each in sorted(kept)])
        print(f"{name}: planned", file=sys.stderr)
    write_part(PAGE, SCRIPT, part(read_rows(ROWS)))


if __name__ == "__main__":
    main()
