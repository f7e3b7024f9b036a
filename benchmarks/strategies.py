"""Published strategies beside the default one on the eight reference models, by cost model ``flops``.

    python benchmarks/strategies.py [MODEL …] [--pages]

The frontier of each strategy on the same graph: its least peak, and by how many points of time ``hybrid`` is
faster, and slower, at most at a peak of theirs. Each model in a process of its own, one thread. Rows go to
``data/strategies.csv``, the table from them to docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from differences import Difference, differences
from generated import Row, circumstances, days, loads, versions, write_part
from reference import PAGE, made, measured_again, options_of, title

import hybridremat

SCRIPT: Final = "strategies.py"
ROWS: Final = Path(__file__).with_name("data") / "strategies.csv"
COLUMNS: Final = (
    *("model", "strategy", "least", "faster", "faster_at", "slower", "slower_at"),
    *("load", "date", "torch"),
)
DEFAULT: Final = "hybrid"
OTHERS: Final = ("rockmate", "rotor", "min-peak", "every-block", "sqrt")
TOLD: Final = 0.005
"""Points of time below which a difference is none."""


def measured(name: str) -> list[Row]:
    """The rows of one model, planned in this process; shares are of the plain step's peak."""
    model, batch = made(name)
    around = {"model": name, **circumstances(os.getloadavg()[0])}
    default = frontier(model, batch, DEFAULT)
    rows = [{"strategy": DEFAULT, "least": least(default), **around}]
    for strategy in OTHERS:
        other = frontier(model, batch, strategy)
        found = beside(differences(default, other), default.plain_peak)
        rows.append({"strategy": strategy, "least": least(other), **found, **around})
    return rows


def frontier(model: Any, batch: Mapping[str, Any], strategy: str) -> hybridremat.Frontier:
    """The frontier of a strategy."""
    how: dict[str, Any] = {"cost_model": "flops", "strategy": strategy, "progress": False}
    return hybridremat.frontier(model, kwargs=batch, **how)


def least(found: hybridremat.Frontier) -> float:
    """The least peak in percent of the plain step's."""
    return round(100 * found.least.peak / found.plain_peak, 2)


def beside(found: Sequence[Difference], plain_peak: int) -> Row:
    """By how many points the default is faster, and slower, at most, and at which peaks in percent."""
    fastest, slowest = (most(found, key=lambda each: each.points) for most in (min, max))
    return {
        "faster": round(max(0.0, -fastest.points), 3),
        "faster_at": round(100 * fastest.peak / plain_peak, 2),
        "slower": round(max(0.0, slowest.points), 3),
        "slower_at": round(100 * slowest.peak / plain_peak, 2),
    }


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows), "", slower(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    return (
        f"`python benchmarks/strategies.py`: {days(rows)}, {versions(rows)}, one thread, 2 cores with "
        f"{loads(rows)}, cost model `flops`. Each strategy's least peak in percent of the plain step's, and "
        f"by how many points of time `{DEFAULT}` is faster at most at a peak of theirs: by what its frontier "
        "holds there, and by its plan for that limit where that is slower."
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    strategies = (DEFAULT, *OTHERS)
    yield f"| model | {' | '.join(f'`{each}`' for each in strategies)} |"
    yield "|" + "---|" * (1 + len(strategies))
    by_model = {(row["model"], row["strategy"]): row for row in rows}
    for name in dict.fromkeys(row["model"] for row in rows):
        cells = [cell(by_model[name, strategy]) for strategy in strategies]
        yield f"| {title(name)} | {' | '.join(cells)} |"


def cell(row: Row) -> str:
    """A strategy's least peak, and what the default gains."""
    found = f"{float(row['least']):.1f} %"
    return found if row["strategy"] == DEFAULT else f"{found}, {float(row['faster']):.1f}"


def slower(rows: Sequence[Row]) -> str:
    """Whether the default is slower anywhere."""
    others = [row for row in rows if row["strategy"] != DEFAULT]
    worst = max(others, key=lambda row: float(row["slower"]))
    if float(worst["slower"]) < TOLD:
        return f"At no peak of any is `{DEFAULT}` slower."
    return (
        f"`{DEFAULT}` is slower by {float(worst['slower']):.2f} points at most: {title(worst['model'])} "
        f"beside `{worst['strategy']}`, at {float(worst['slower_at']):.1f} % of the plain peak."
    )


def main() -> None:
    """Measure the models asked for and write the page."""
    options = options_of(__doc__)
    if options.here:
        print(json.dumps(measured(options.here)))
        return
    write_part(PAGE, SCRIPT, part(measured_again(__file__, ROWS, COLUMNS, options.names)))


if __name__ == "__main__":
    main()
