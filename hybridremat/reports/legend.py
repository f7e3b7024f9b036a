"""What the terms of ``print(plan)`` and of the HTML report mean."""

from __future__ import annotations

from collections.abc import Collection

from rich.table import Table
from rich.text import Text

LEGEND_WIDTH = 100
_TERMS = {
    "most saved": "values that the forward keeps for the backward, by bytes in all: ×n of them, and the "
    "blocks that make them",
    "most recomputed": "values that are dropped and made again for the backward",
    "limit": "the most step memory that the plan promises: all that is allocated on top of parameters, "
    "optimizer state and inputs",
    "sizes": "what inputs may have where this plan file is applied, and the schedules that it has for that",
    "predicted peak": "the step memory of the plan, exact",
    "plain peak": "the step memory without a plan",
    "with your own code": "the same with reserve and further forwards",
    "least feasible": "the smallest limit that blocks can be composed for",
    "overhead": "extra time by the cost model, and extra flops, against the plain step",
    "exchanges": "recomputations swapped for others of less time after the blocks were composed",
    "at best": "what is proven of all schedules under this limit",
    "tuned": "what real training steps said of schedules near the plan: the shortest step of each",
    "moves": "values that wait in host memory between forward and backward",
    "saved": "what is alive when the forward is over",
    "in place": "calls that write their result over an input that nobody reads again",
    "by parts": "calls that run piece by piece, and so hold less while they run",
    "left early": "gradients that leave in the backward, as soon as they are final",
    "graph break": "where Python code runs between two graphs; what crosses it is kept",
    "block": "a layer or so: the unit of planning; ×n: blocks with equal decisions, of which one is shown",
    "ops": "kernels of its forward / of its backward",
    "option": "which of the ways to run it was chosen (2 of 9); solo: all of it runs again before its "
    "backward; plain: nothing was decided; moves: some of its values wait in host memory",
    "bytes": "what it saves, and the peaks of its forward (fwd) and backward (bwd), without what other "
    "blocks hold",
    "time": "of its forward; extra: of all that it runs again",
    "terms": "each in full, and all others: docs/glossary.md",
}
_OF_TABLE = ("most saved", "most recomputed", "block", "ops", "option", "bytes", "time", "terms")


def legend(shown: Collection[str]) -> list[tuple[str, str]]:
    """Terms and meanings: those of the tables, and of the summary's lines those that are ``shown``."""
    return [(term, meaning) for term, meaning in _TERMS.items() if term in shown or term in _OF_TABLE]


def legend_table(shown: Collection[str]) -> Table:
    """:func:`legend` as a table, one row for each term."""
    grid = Table.grid(padding=(0, 2))
    grid.width = LEGEND_WIDTH
    grid.add_column(style="bold dim", no_wrap=True)
    grid.add_column(style="dim")
    for term, meaning in legend(shown):
        grid.add_row(term, Text(meaning))
    return grid
