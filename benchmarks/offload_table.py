"""The tables of moves: time at limits, and others' ways beside plans for what they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from generated import Row, days, loads, versions
from offload_models import LEAST, MODELS, PEERS


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows), "", *peers_table(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the tables."""
    seconds = [float(row["seconds"]) for row in rows if row["seconds"]]
    captures = [int(row["capture"]) for row in rows]
    return (
        f"`python benchmarks/offload.py`: {days(rows)}, {versions(rows)}, one thread, 2 cores with "
        f"{loads(rows)}; nothing ran on the devices: bfloat16, times by `roofline` of their specs, copies "
        "of 10 µs and their bytes at the rate that stands there, in GB a second each way, both at one "
        "time (planned with is 0.85 of what is measured: 25 stands for a link that measures 29.4). Time "
        "beside the plain step's, in percent, under limits in percent of its peak: recomputation alone / "
        "with moves (no schedule with moves below). *Least*: the least limit without moves, that with them, "
        f"and the time it takes. Capture, blocks and chains took {min(captures)} to {max(captures)} s, a "
        f"limit with moves then {min(seconds):.0f} to {max(seconds):.0f} CPU seconds."
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Limits of each model and link."""
    shares = {row["limit"] for row in rows if row["limit"].endswith("%")}
    limits = sorted(shares, key=by_size, reverse=True)
    yield f"| model, device, GB/s | {' | '.join(limits)} | least |"
    yield "|" + "---|" * (2 + len(limits))
    for model, link in pairs(rows):
        of = {row["limit"]: row for row in rows if (row["model"], row["link"]) == (model, link)}
        cells = [cell(of[limit]) if limit in of else "" for limit in limits]
        yield f"| {model}, {float(link):g} | {' | '.join(cells)} | {least(of[LEAST])} |"


def peers_table(rows: Sequence[Row]) -> Iterator[str]:
    """Others' ways beside plans for what they need."""
    titles = [f"`{name}` at its peak: its time / ours" for name in PEERS]
    yield f"| model, device, GB/s | {' | '.join(titles)} |"
    yield "|---|---|---|"
    for model, link in pairs(rows):
        of = {row["limit"]: row for row in rows if (row["model"], row["link"]) == (model, link)}
        if not all(name in of for name in PEERS):
            continue
        cells = (
            f"{float(of[name]['percent']):.1f} %: {one(of[name]['theirs'])} / {one(of[name]['ours'])}"
            for name in PEERS
        )
        yield f"| {model}, {float(link):g} | {' | '.join(cells)} |"


def pairs(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """Models and links, in the order of the rows."""
    yield from dict.fromkeys((row["model"], row["link"]) for row in rows)


def cell(row: Row) -> str:
    """Recomputation alone, with moves, and the bound."""
    if not row["ours"]:
        return "–"
    return f"{one(row['recomputed'])} / {one(row['ours'])} ({one(row['bound'])})"


def least(row: Row) -> str:
    """The least limits, without moves and with them, and what the latter takes."""
    return f"{one(row['alone'])} → {one(row['percent'])} %: {one(row['ours'])}"


def one(figure: str) -> str:
    """A figure with one decimal; a dash where there is none."""
    return f"{float(figure):.1f}" if figure else "–"


def by_size(limit: str) -> int:
    """The share of a limit."""
    return int(limit.split()[0])


def place(row: Row) -> tuple[int, float, int]:
    """Where a row stands: by model, link and limit."""
    kinds = (*PEERS, LEAST)
    limit = -by_size(row["limit"]) if row["limit"].endswith("%") else kinds.index(row["limit"])
    return [*MODELS].index(row["model"]), float(row["link"]), limit
