"""The tables of ``compiled.py``, from its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Final

from generated import Row, days, loads, older_day, read_rows, versions
from marks import DATA, recorded_frontier, recorded_models
from reference import title
from stock_inductor import returns_loss_alone

SCRIPT: Final = "compiled.py"
STOCK: Final = DATA / "stock_inductor.csv"
LEAST, BESIDE, LIMITS, TIMES = "least", "beside stock", "limits", "times"
"""Kinds of rows. Limits and times are parts of their own."""

HALF, POINT = 0.5, 1.0
"""Ours: at most this share of stock's extra flops, or this many percent."""
WHOLE: Final = 1.02
"""What a step may take at 100 %, as a multiple of stock's time."""

OLDER: Final = " Rows of an earlier day say so; they were made beside other work on both cores."


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    run = {kind: [row for row in rows if row["kind"] == kind] for kind in (LIMITS, TIMES)}
    sections = [described(rows), *beside_table(rows), "", *least_table(rows)]
    sections += ["", *limits_table(run[LIMITS])] if run[LIMITS] else []
    sections += ["", *times_table(run[TIMES])] if run[TIMES] else []
    return "\n".join(sections)


def circumstances_of(rows: Sequence[Row]) -> str:
    """How rows were measured."""
    return f"{days(rows)}, {versions(rows)}, one thread, 2 cores with {loads(rows)}"


def described(rows: Sequence[Row]) -> str:
    """What stands above the table of plans beside stock steps."""
    plans = [row for row in rows if row["kind"] in (LEAST, BESIDE) and row["load"]]
    seconds = sorted(float(row["seconds"]) for row in plans if row["seconds"])
    older = "" if len(plans) == sum(row["kind"] in (LEAST, BESIDE) for row in rows) else OLDER
    took = " to ".join(dict.fromkeys(f"{each:.0f}" for each in (seconds[0], seconds[-1])))
    return (
        f"`python benchmarks/compiled.py`: {circumstances_of(plans)}, cost model `flops`. Stock is "
        "`torch.compile` with PyTorch's `activation_memory_budget`, with every layer checkpointed, with the "
        "loss returned alone, and (GPT-2, Llama) with Inductor's `auto_chunker`: "
        "`benchmarks/data/stock_inductor.csv`, 2026-11-22. Peaks are shares of plain eager's, those of ours "
        "of the lowered code, which was not built for these two tables. Listed is every stock step that no "
        "other stock step of a model with the same outputs beats in both. Asked for is half of its extra "
        "flops, or a percent. Checkpointed layers of BERT and T5 break the graph: the extra flops of these "
        f"are eager's. A frontier took {took} CPU seconds.{older}\n"
    )


def beside_table(rows: Sequence[Row]) -> Iterator[str]:
    """Plans at the peaks of stock steps."""
    yield "| model | stock | its peak | its extra flops | our peak | our extra flops |"
    yield "|---|---|---|---|---|---|"
    for name, what in _parts(rows, BESIDE):
        for number, row in enumerate(_of(rows, BESIDE, name, what)):
            model = _title(name, what, row) if not number else ""
            theirs, asked = f"{_stock_extra(row):.1f} %", _asked(row)
            mark = f" ({asked:.1f} was asked for)" if not reached(row) else ""
            extra = f"{float(row['extra']):.1f} %{mark}" if row["extra"] else "–"
            ours = _share(name, row["peak"]) if row["peak"] else "–"
            yield f"| {model} | {_way(row)} | {_share(name, row['limit'])} | {theirs} | {ours} | {extra} |"


def least_table(rows: Sequence[Row]) -> Iterator[str]:
    """The least peaks, ours and stock's."""
    yield "Least peaks, and ours as a multiple of stock's. Asked for is three quarters:\n"
    yield "| model | ours | op by op | stock, budgets | ratio | stock, checkpoints | ratio |"
    yield "|---|---|---|---|---|---|---|"
    for name, what in _parts(rows, LEAST):
        peaks = {row["method"]: row for row in _of(rows, LEAST, name, what)}
        first, ours = peaks["inductor"], int(peaks["inductor"]["peak"])
        floor = _share(name, peaks["op by op"]["peak"]) if "op by op" in peaks else "–"
        cells = [_title(name, what, first), _share(name, ours), floor]
        for checkpointed in (False, True):
            stock = _least_stock(name, alone="alone" in what, checkpointed=checkpointed)
            chunked = " (chunked)" if stock["method"].startswith("chunked") else ""
            cells += [_share(name, stock["peak_bytes"]) + chunked, f"{ours / int(stock['peak_bytes']):.2f}"]
        yield f"| {' | '.join(cells)} |"


def _least_stock(name: str, *, alone: bool, checkpointed: bool) -> Row:
    """The stock step of least memory, with layers checkpointed or not."""
    alike = [
        row
        for row in read_rows(STOCK)
        if row["model"] == name
        and returns_loss_alone(row["method"]) is alone
        and ("checkpoint" in row["method"]) is checkpointed
    ]
    return min(alike, key=lambda row: int(row["peak_bytes"]))


def limits_table(rows: Sequence[Row]) -> Iterator[str]:
    """Peaks of plans that were built and run."""
    steps = [(json.loads(row["measured"]), int(row["peak"]), int(row["limit"])) for row in rows]
    ran = sum(len(peaks) for peaks, _, _ in steps)
    equal = sum(peak == predicted for peaks, predicted, _ in steps for peak in peaks)
    kept = sum(peak <= limit for peaks, _, limit in steps for peak in peaks)
    yield (
        "Built and run (`--run`), at limits spread from the least to the plain step, three steps each, "
        f"{circumstances_of(rows)}: in {equal} of {ran} steps the measured peak was the predicted one to the "
        f"byte, and in {kept} under the limit.\n"
    )
    yield "| model | limits | measured peaks |"
    yield "|---|---|---|"
    for name, what in _parts(rows, LIMITS):
        mine = _of(rows, LIMITS, name, what)
        shares = ", ".join(_share(name, row["limit"]) for row in mine)
        most = ", ".join(_share(name, max(json.loads(row["measured"]))) for row in mine)
        yield f"| {title(name)} | {shares} | {most} |"


def times_table(rows: Sequence[Row]) -> Iterator[str]:
    """Times of steps beside stock's."""
    yield (
        f"Time (`--run`): medians of 20 steps in turn with stock's, CPU time, {versions(rows)}, one thread, "
        "cost model `profile`. *To our 100 %* is the quotient of the two. *Planning* and *compiling* are "
        "seconds of wall clock of the plan for 50 %, where they were kept.\n"
    )
    yield (
        "| model | 100 %: to stock | 50 %: to stock | 50 %: to our 100 % | predicted | planning, compiling "
        "| measured |"
    )
    yield "|---|---|---|---|---|---|---|"
    for name, what in _parts(rows, TIMES):
        mine = {row["limit"]: row for row in _of(rows, TIMES, name, what)}
        whole, half = (mine.get(limit) for limit in ("100%", "50%"))
        cells = [title(name), _whole_time(whole) if whole else "–"]
        if half and whole:
            ratio, predicted = float(half["measured"]), 1 + float(half["extra"]) / 100
            cells += [f"{ratio:.2f}", f"{ratio / float(whole['measured']):.2f}", f"{predicted:.2f}"]
            cells.append(_seconds(half))
        else:
            cells += ["–"] * 4
        when = f"{days([*mine.values()])}, {loads([*mine.values()])}"
        yield f"| {' | '.join((*cells, when))} |"


def reached(row: Row) -> bool:
    """Whether a plan takes no more memory than the stock step, and no more extra flops than it may."""
    return bool(row["extra"]) and float(row["extra"]) <= _asked(row)


def unreached(rows: Sequence[Row]) -> Iterator[str]:
    """The plans that take more than they may, in words."""
    for row in rows:
        if row["kind"] == BESIDE and not reached(row):
            yield f"{row['model']}: {row['extra'] or 'no plan'} at {row['method']} {row['budget']}"


def _asked(row: Row) -> float:
    """The most extra flops that a plan may take, in percent."""
    return max(HALF * _stock_extra(row), POINT)


def _stock_extra(row: Row) -> float:
    key = row["model"], row["method"], row["budget"]
    found = next(row for row in read_rows(STOCK) if (row["model"], row["method"], row["budget"]) == key)
    return float(found["extra_flops_percent"])


def _parts(rows: Sequence[Row], kind: str) -> list[tuple[str, str]]:
    """Models and parts that have rows of a kind, in the order of the page."""
    found = {(row["model"], row["part"]) for row in rows if row["kind"] == kind}
    return sorted(found, key=lambda each: (recorded_models().index(each[0]), each[1]))


def _whole_time(row: Row) -> str:
    """A multiple of stock's time."""
    found = round(float(row["measured"]), 2)
    return f"{found:.2f}" + (f" ({WHOLE} was asked for)" if found > WHOLE else "")


def _seconds(row: Row) -> str:
    """Of planning and of compilation."""
    return f"{float(row['seconds']):.0f}, {float(row['compile']):.0f}" if row["seconds"] else "–"


def _of(rows: Sequence[Row], kind: str, name: str, what: str) -> list[Row]:
    return [row for row in rows if (row["kind"], row["model"], row["part"]) == (kind, name, what)]


def _title(name: str, what: str, row: Row) -> str:
    """A model and what it returns, with the day of rows whose load was not kept."""
    return title(name) + (", loss alone" if "alone" in what else "") + older_day(row)


def _way(row: Row) -> str:
    """A way to use Inductor as the table names it."""
    method = row["method"].removeprefix("loss alone, ")
    return f"{method} {row['budget']}" if method.endswith("budget") else method


def _share(name: str, size: str | int) -> str:
    """Of plain eager's recorded peak."""
    return f"{100 * int(size) / recorded_frontier(name)[0]:.1f} %"
