"""What is proven about the default strategy's plans of the eight reference models, by cost model ``flops``.

    python benchmarks/gaps.py [MODEL …] [--pages]

Plans for some shares of the plain step's peak, where these are feasible, and for the least limit and a tenth
more, each with its certificate. Each model in a process of its own, one thread. Rows go to ``data/gaps.csv``,
the table from them to docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from generated import Row, circumstances, cpu_seconds, days, loads, versions, write_part
from reference import PAGE, made, measured_again, options_of, title

import hybridremat

SCRIPT: Final = "gaps.py"
ROWS: Final = Path(__file__).with_name("data") / "gaps.csv"
COLUMNS: Final = (
    *("model", "limit", "percent", "overhead", "gap", "least", "least_bound", "seconds"),
    *("load", "date", "torch"),
)
SHARES: Final = (70, 50, 40, 30)
NEAR: Final = "least + 10 %"
LIMITS: Final = (*(f"{share} %" for share in SHARES), NEAR)


def measured(name: str) -> list[Row]:
    """The rows of one model, planned in this process."""
    model, batch = made(name)
    found = hybridremat.frontier(model, kwargs=batch, cost_model="flops", progress=False)
    least = found.least.peak
    limits = {f"{share} %": share * found.plain_peak // 100 for share in SHARES}
    limits = {how: limit for how, limit in limits.items() if limit >= least}
    limits[NEAR] = 11 * least // 10
    return [{"model": name, "limit": how, **certified(found, limit)} for how, limit in limits.items()]


def certified(found: hybridremat.Frontier, limit: int) -> Row:
    """What is proven of the plan under a limit, in percent: rounded so that it stays true."""
    plan, plain = found.plan(memory_limit=limit), found.plain_peak
    load, started = os.getloadavg()[0], cpu_seconds()
    proven = plan.certified(progress=False).certificate
    seconds = cpu_seconds() - started
    assert proven is not None
    return {
        "percent": round(100 * limit / plain, 1),
        "overhead": round(100 * plan.overhead, 2),
        "gap": math.ceil(10_000 * proven.gap) / 100,
        "least": round(100 * found.least.peak / plain, 2),
        "least_bound": math.floor(10_000 * proven.least_bound / plain) / 100,
        "seconds": round(seconds, 1),
        **circumstances(load),
    }


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    seconds = [float(row["seconds"]) for row in rows]
    return (
        f"`python benchmarks/gaps.py`: {days(rows)}, {versions(rows)}, one thread, 2 cores with "
        f"{loads(rows)}, cost model `flops`, default strategy. Under limits in percent of the plain step's "
        "peak: extra time, and by how much of the step's time a better schedule could be faster at most. "
        "*Least + 10 %* is a tenth above the least feasible peak, which is in the last column, beside the "
        f"one that no schedule goes below. A bound took {min(seconds):.1f} to {max(seconds):.1f} CPU seconds."
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield f"| model | {' | '.join(LIMITS)} | least peak, bound |"
    yield "|" + "---|" * (2 + len(LIMITS))
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = {row["limit"]: row for row in rows if row["model"] == name}
        cells = [cell(of_model[limit]) if limit in of_model else "–" for limit in LIMITS]
        bound = max(float(row["least_bound"]) for row in of_model.values())
        yield f"| {title(name)} | {' | '.join(cells)} | {float(of_model[NEAR]['least']):.2f} %, {bound:.2f} |"


def cell(row: Row) -> str:
    """Extra time and gap; near the least peak the limit, too."""
    found = f"{float(row['overhead']):.1f} %, {float(row['gap']):.2f}"
    return f"{found} (at {row['percent']} %)" if row["limit"] == NEAR else found


def main() -> None:
    """Measure the models asked for and write the page."""
    options = options_of(__doc__)
    if options.here:
        print(json.dumps(measured(options.here)))
        return
    write_part(PAGE, SCRIPT, part(measured_again(__file__, ROWS, COLUMNS, options.names)))


if __name__ == "__main__":
    main()
