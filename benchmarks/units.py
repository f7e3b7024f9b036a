"""Plans of the eight reference models by units, their layers, beside those of the whole graph; ``flops``.

    python benchmarks/units.py [MODEL …] [--pages]

Extra time under 80, 60 and 40 % of the whole graph's plain peak, the same bytes for all: of the plan by
units; of what the whole graph's blocks are composed to, without searches across them; of the whole graph's
plan. Each model in a process of its own, one thread. Rows go to ``data/units.csv``, the table from them to
docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from generated import Row, circumstances, cpu_seconds, days, loads, versions, write_part
from reference import PAGE, made, measured_again, options_of, title

import hybridremat

SCRIPT: Final = "units.py"
ROWS: Final = Path(__file__).with_name("data") / "units.csv"
COLUMNS: Final = (
    *("model", "limit", "units", "composed", "whole", "least_units", "least_whole"),
    *("seconds_units", "seconds_whole", "load", "date", "torch"),
)
SHARES: Final = (80, 60, 40)
UNITS: Final[Mapping[str, tuple[str, ...]]] = {
    "gpt2": ("transformer.h.*",),
    "llama": ("model.layers.*",),
    "bert": ("bert.encoder.layer.*",),
    "vit": ("vit.layers.*",),
    "t5": ("encoder.block.*", "decoder.block.*"),
    "resnet50": ("resnet.encoder.stages.*.layers.?",),
    "unet": ("down.*", "middle", "merge.*"),
}


def measured(name: str) -> list[Row]:
    """The rows of one model, planned in this process."""
    model, batch = made(name)
    how: dict[str, Any] = {"kwargs": batch, "cost_model": "flops", "progress": False}
    units = {**how, "units": UNITS[name.partition("_")[0]]}
    plain = hybridremat.plan(model, memory_limit="100%", **how).plain_peak
    rows: list[Row] = []
    for share in SHARES:
        limit, load, started = share * plain // 100, os.getloadavg()[0], cpu_seconds()
        row: Row = {"model": name, "limit": share}
        row |= planned(model, "units", limit, units)
        row["seconds_units"], started = round(cpu_seconds() - started, 1), cpu_seconds()
        row |= planned(model, "whole", limit, how)
        row["seconds_whole"] = round(cpu_seconds() - started, 1)
        rows.append({**row, **circumstances(load)})
    least = {"least_units": least_bytes(model, units), "least_whole": least_bytes(model, how)}
    return [{**row, **{way: round(100 * size / plain, 1) for way, size in least.items()}} for row in rows]


def least_bytes(model: Any, how: Mapping[str, Any]) -> int:
    """The least feasible limit, as the error names it."""
    try:
        hybridremat.plan(model, memory_limit=1, **how)
    except hybridremat.InfeasibleLimitError as error:
        return error.least
    raise AssertionError("a step fits into a byte")


def planned(model: Any, way: str, limit: int, how: Mapping[str, Any]) -> Row:
    """Extra time in percent under a limit; nothing where there is no plan."""
    try:
        plan = hybridremat.plan(model, memory_limit=limit, **how)
    except hybridremat.InfeasibleLimitError:
        return {}
    composed = {} if way == "units" else {"composed": percent(plan.composed_overhead, plan.overhead)}
    return {way: percent(plan.overhead), **composed}


def percent(overhead: float | None, default: float = 0.0) -> float:
    """A fraction in percent."""
    return round(100 * (default if overhead is None else overhead), 2)


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    return (
        f"`python benchmarks/units.py`: {days(rows)}, {versions(rows)}, one thread, 2 cores with "
        f"{loads(rows)}, cost model `flops`, default strategy. Extra time in percent under the same bytes, "
        "which are a share of the whole graph's plain peak: *units* is the plan of the layers one by one, "
        "*composed* what the blocks of the whole graph are composed to, before searches across them, and "
        "*whole* the whole graph's plan. *Least* are the least bytes by units and of the whole graph, in "
        "percent of the same."
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    shares = [f"{share} %: units, composed, whole" for share in SHARES]
    yield f"| model | {' | '.join(shares)} | least | CPU seconds a plan |"
    yield "|" + "---|" * (3 + len(SHARES))
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == name]
        ways = "units", "composed", "whole"
        cells = [", ".join(str(row.get(way) or "–") for way in ways) for row in of_model]
        seconds = [max(float(row[f"seconds_{way}"]) for row in of_model) for way in ("units", "whole")]
        least = f"{of_model[0]['least_units']}, {of_model[0]['least_whole']}"
        yield f"| {title(name)} | {' | '.join(cells)} | {least} | {seconds[0]}, {seconds[1]} |"


def main() -> None:
    """Measure the models asked for and write the page."""
    options = options_of(__doc__)
    if options.here:
        print(json.dumps(measured(options.here)))
        return
    write_part(PAGE, SCRIPT, part(measured_again(__file__, ROWS, COLUMNS, options.names)))


if __name__ == "__main__":
    main()
