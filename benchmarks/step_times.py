"""Times of planned steps beside plain eager ones: at 100 % of the memory, and predicted against measured.

    python benchmarks/step_times.py [NAME …] [--rounds N] [--pages]

CPU time of one thread. Every model is trained eager, by ``torch.compile(backend="aot_eager")``, and with
plans for 100 % and some lower limits, turn and turn about in one process, and the median of the ratios to the
eager step of the same round counts. Plans go by ``cost_model="profile"``. Rows go to
``data/step_times.csv``, the tables from them to docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from generated import Row, in_a_process, loads, read_rows, write_part, write_rows
from rich.console import Console

SCRIPT: Final = "step_times.py"
ROWS: Final = Path(__file__).with_name("data") / "step_times.csv"
PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
COLUMNS: Final = (
    *("model", "limit", "predicted", "measured", "milliseconds", "rounds"),
    *("load", "date", "torch"),
)
WARM_UP: Final = 3
WITHIN: Final = 2.0
"""Points that a prediction may be off."""

TINY: Final = {"n_layer": 12, "n_embd": 64, "n_head": 2, "batch": 1, "length": 16, "vocab_size": 128}
MODELS: Final[Mapping[str, tuple[str, Mapping[str, Any], tuple[int, ...]]]] = {
    "GPT-2": ("gpt2", {}, (60, 42, 28)),
    "Llama": ("llama", {}, (65, 48, 34)),
    "BERT": ("bert", {}, (60, 45, 32)),
    "ViT": ("vit", {}, (70, 55, 45)),
    "T5": ("t5", {}, (55, 40, 30)),
    "ResNet-50": ("resnet50", {}, (75, 65, 55)),
    "U-Net": ("unet", {}, (60, 45, 38)),
    "GPT-2, tiny": ("gpt2", TINY, ()),
}
"""The built-in model, changes of its config, and limits in percent of the plain peak."""

Step = Callable[[], float]
"""Runs a step and returns its CPU seconds."""


def timed_step(model: Any, batch: Mapping[str, Any]) -> Step:
    """A step of a model, with gradients dropped afterwards."""
    from hybridremat.analysis.measure import loss_of

    def step() -> float:
        started = time.process_time()
        loss_of(model(**batch)).backward()
        seconds = time.process_time() - started
        for parameter in model.parameters():
            parameter.grad = None
        return seconds

    return step


def prepared(name: str) -> Iterator[tuple[str, float, Step]]:
    """Each way to train a model: its name, the overhead that is predicted, and its step."""
    import torch

    import hybridremat
    from hybridremat.zoo.models import reference_model

    target, changes, limits = MODELS[name]
    torch.set_num_threads(1)
    model, batch = reference_model(target, 0.0, changes)
    yield "eager", 0.0, timed_step(copy.deepcopy(model), batch)
    yield "aot_eager", 0.0, timed_step(torch.compile(copy.deepcopy(model), backend="aot_eager"), batch)
    for limit in (100, *limits):
        planned = copy.deepcopy(model)
        hybridremat.wrap(planned, kwargs=batch, memory_limit=f"{limit}%", progress=False)
        yield f"{limit}%", hybridremat.get_plan(planned).overhead, timed_step(planned, batch)


def measured(name: str, rounds: int) -> list[Row]:
    """The rows of one model, measured in this process."""
    import torch

    load = os.getloadavg()[0]
    ways = list(prepared(name))
    for _ in range(WARM_UP):
        for _, _, step in ways:
            step()
    seconds: dict[str, list[float]] = {way: [] for way, _, _ in ways}
    for _ in range(rounds):
        for way, _, step in ways:
            seconds[way].append(step())
    ratio = {
        way: statistics.median(a / b for a, b in zip(each, seconds["eager"], strict=True))
        for way, each in seconds.items()
    }
    return [
        {
            "model": name,
            "limit": way,
            "predicted": round(100 * predicted, 2),
            "measured": round(100 * (ratio[way] - 1), 2),
            "milliseconds": round(1000 * statistics.median(seconds[way]), 2),
            "rounds": rounds,
            "load": round(load, 1),
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
        }
        for way, predicted, _ in ways
    ]


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *whole(rows), "", *lower(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the tables."""
    return (
        f"`python benchmarks/step_times.py`: CPU time, {max(row['date'] for row in rows)}, torch "
        f"{rows[-1]['torch']}, one thread, 2 cores with {loads(rows)}, "
        f"medians of {rows[-1]['rounds']} rounds, cost model `profile`. At 100 % of the plain peak, as a "
        "multiple of plain eager's time:"
    )


def whole(rows: Sequence[Row]) -> Iterator[str]:
    """The table of steps under all of the memory."""
    yield "| model | a step | at 100 % | `aot_eager` |"
    yield "|---|---|---|---|"
    by_way = {(row["model"], row["limit"]): row for row in rows}
    for name in (each for each in MODELS if (each, "100%") in by_way):
        times = [f"{1 + float(by_way[name, way]['measured']) / 100:.2f}" for way in ("100%", "aot_eager")]
        milliseconds = float(by_way[name, "eager"]["milliseconds"])
        yield f"| {name} | {milliseconds:.0f} ms | {' | '.join(times)} |"


def lower(rows: Sequence[Row]) -> Iterator[str]:
    """The table of lower limits."""
    whole = {row["model"]: 1 + float(row["measured"]) / 100 for row in rows if row["limit"] == "100%"}
    limited = [row for row in rows if row["limit"][:-1].isdigit() and row["limit"] != "100%"]
    extra = [100 * ((1 + float(each["measured"]) / 100) / whole[each["model"]] - 1) for each in limited]
    off = [float(row["predicted"]) - each for row, each in zip(limited, extra, strict=True)]
    beside = [float(row["predicted"]) - float(row["measured"]) for row in limited]
    near = sum(abs(each) <= WITHIN for each in off)
    yield (
        f"Extra time under lower limits. Beside the planned step at 100 %, {near} of {len(off)} predictions "
        f"are within {WITHIN:.0f} points, and predicted less measured is {statistics.mean(off):+.1f} in the "
        f"mean; beside plain eager steps it is {statistics.mean(beside):+.1f}, as what a planned step gains "
        "by writing in place is not predicted."
    )
    yield ""
    yield "| model | limit | predicted | measured, to 100 % | to eager |"
    yield "|---|---|---|---|---|"
    for row, measured, each in zip(limited, extra, off, strict=True):
        mark = "**" if abs(each) > WITHIN else ""
        figures = f"{float(row['predicted']):.1f} % | {mark}{measured:.1f} %{mark}"
        eager = float(row["measured"])
        yield f"| {row['model']} | {row['limit'][:-1]} % | {figures} | {eager:.1f} % |"


def main() -> None:
    """Measure the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.here, options.rounds)))
        return
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(MODELS)}")
    rows, console = read_rows(ROWS), Console(stderr=True)
    for name in () if options.pages else options.names or MODELS:
        found = in_a_process(__file__, "--here", name, "--rounds", str(options.rounds))
        console.print(*(f"{row['limit']}: {row['predicted']}, {row['measured']}" for row in found), sep="\n")
        rows = [row for row in rows if row["model"] != name] + found
        rows.sort(key=lambda row: [*MODELS].index(row["model"]))
        write_rows(ROWS, COLUMNS, rows)
    write_part(PAGE, SCRIPT, part(rows))


if __name__ == "__main__":
    main()
