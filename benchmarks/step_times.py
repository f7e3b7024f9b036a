"""Times of planned steps beside plain eager ones: at 100 % of the memory, and predicted against measured.

    python benchmarks/step_times.py [NAME …] [--rounds N] [--pages]

CPU time of one thread. Every model is trained eager, by ``torch.compile(backend="aot_eager")``, and with
plans for 100 % and some lower limits, turn and turn about in one process, and the median of the ratios to the
eager step of the same round counts. Plans go by ``cost_model="profile"``. All of it twice, with the same
plans: glibc keeps the memory that a step frees, or gives it back to the system, as it does unless told
otherwise, to fault its pages in again at the next step. Rows go to ``data/step_times.csv``, the tables from
them to docs/benchmarks.md; ``--pages`` does only that.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import statistics
import tempfile
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
    *("model", "memory", "limit", "predicted", "measured", "milliseconds", "faults", "rounds"),
    *("load", "date", "torch"),
)
WARM_UP: Final = 3
WITHIN: Final = 2.0
"""Points that a prediction may be off."""

KEPT, RETURNED = "kept", "returned"
MEMORY: Final[Mapping[str, Mapping[str, str]]] = {
    KEPT: {"GLIBC_TUNABLES": f"glibc.malloc.trim_threshold={2**32}:glibc.malloc.mmap_threshold={2**32}"},
    RETURNED: {},
}
"""What becomes of memory that a step frees, by the environment of the process."""

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

Step = Callable[[], tuple[float, int]]
"""Runs a step and returns its CPU seconds, and how many pages it faulted in."""


def page_faults() -> int:
    """Pages that this process has faulted in."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def timed_step(model: Any, batch: Mapping[str, Any]) -> Step:
    """A step of a model, with gradients dropped afterwards."""
    from hybridremat.analysis.measure import loss_of

    def step() -> tuple[float, int]:
        started, faulted = time.process_time(), page_faults()
        loss_of(model(**batch)).backward()
        found = time.process_time() - started, page_faults() - faulted
        for parameter in model.parameters():
            parameter.grad = None
        return found

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


def measured(name: str, memory: str, rounds: int) -> list[Row]:
    """The rows of one model, measured in this process, which was started so."""
    import torch

    load = os.getloadavg()[0]
    ways = list(prepared(name))
    for _ in range(WARM_UP):
        for _, _, step in ways:
            step()
    seconds: dict[str, list[float]] = {way: [] for way, _, _ in ways}
    faults: dict[str, list[int]] = {way: [] for way, _, _ in ways}
    for _ in range(rounds):
        for way, _, step in ways:
            for kept, figure in zip((seconds, faults), step(), strict=True):
                kept[way].append(figure)
    ratio = {
        way: statistics.median(a / b for a, b in zip(each, seconds["eager"], strict=True))
        for way, each in seconds.items()
    }
    return [
        {
            "model": name,
            "memory": memory,
            "limit": way,
            "predicted": round(100 * predicted, 2),
            "measured": round(100 * (ratio[way] - 1), 2),
            "milliseconds": round(1000 * statistics.median(seconds[way]), 2),
            "faults": round(statistics.median(faults[way])),
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
    last, tunables = rows[-1], MEMORY[KEPT]["GLIBC_TUNABLES"]
    return (
        f"`python benchmarks/step_times.py`: CPU time, {max(row['date'] for row in rows)}, torch "
        f"{last['torch']}, one thread, 2 cores with {loads(rows)}, medians of {last['rounds']} rounds, cost "
        "model `profile`. glibc gives memory that a step frees back to the system, and the next step faults "
        "its pages in again. That takes the longer the more memory a step needs, and is no part of a "
        "prediction. So everything is measured twice with the same plans: with memory kept "
        f"(`GLIBC_TUNABLES={tunables}`), and given back. At 100 % of the plain peak, as a multiple of plain "
        "eager's time:"
    )


def whole(rows: Sequence[Row]) -> Iterator[str]:
    """The table of steps under all of the memory."""
    yield (
        "| model | a step | at 100 % | `aot_eager` | a step, memory given back | pages faulted in | at 100 % "
        "| `aot_eager` |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    by_way = {(row["model"], row["memory"], row["limit"]): row for row in rows}
    for name in (each for each in MODELS if (each, KEPT, "100%") in by_way):
        cells = [name]
        for memory in MEMORY:
            eager = by_way[name, memory, "eager"]
            cells.append(f"{float(eager['milliseconds']):.0f} ms")
            cells += [f"{int(eager['faults']):,}"] if memory == RETURNED else []
            cells += [f"{_multiple(by_way[name, memory, way]):.2f}" for way in ("100%", "aot_eager")]
        yield f"| {' | '.join(cells)} |"


def lower(rows: Sequence[Row]) -> Iterator[str]:
    """The table of lower limits."""
    extra = {(*_name(row), row["memory"]): each for row, each in beyond_whole(rows)}
    limited = {_name(row): float(row["predicted"]) for row, _ in beyond_whole(rows) if row["memory"] == KEPT}
    off = [predicted - extra[(*name, KEPT)] for name, predicted in limited.items()]
    near = sum(abs(each) <= WITHIN for each in off)
    yield (
        f"Extra time under lower limits, beside the planned step at 100 %. With memory kept {near} of "
        f"{len(off)} predictions are within {WITHIN:.0f} points, and predicted less measured is "
        f"{round(statistics.mean(off), 1) + 0.0:+.1f} in the mean."
    )
    yield ""
    yield "| model | limit | predicted | measured | memory given back |"
    yield "|---|---|---|---|---|"
    for (name, predicted), each in zip(limited.items(), off, strict=True):
        mark = "**" if abs(each) > WITHIN else ""
        kept, returned = (f"{extra[(*name, memory)]:.1f} %" for memory in MEMORY)
        yield f"| {name[0]} | {name[1][:-1]} % | {predicted:.1f} % | {mark}{kept}{mark} | {returned} |"


def beyond_whole(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Rows of lower limits, each with its percents of time beyond the step at 100 %."""
    whole = {(row["model"], row["memory"]): _multiple(row) for row in rows if row["limit"] == "100%"}
    for row in rows:
        if row["limit"][:-1].isdigit() and row["limit"] != "100%":
            yield row, 100 * (_multiple(row) / whole[row["model"], row["memory"]] - 1)


def _multiple(row: Row) -> float:
    """Of plain eager's time."""
    return 1 + float(row["measured"]) / 100


def _name(row: Row) -> tuple[str, str]:
    return row["model"], row["limit"]


def both_ways(name: str, rounds: int) -> Iterator[Row]:
    """The rows of one model, with memory kept and given back, by the same plans."""
    with tempfile.TemporaryDirectory() as folder:
        for memory, environment in MEMORY.items():
            around = {"HYBRIDREMAT_CACHE": folder, **environment}
            yield from in_a_process(
                __file__, "--here", name, "--memory", memory, "--rounds", str(rounds), environment=around
            )


def main() -> None:
    """Measure the models asked for and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--pages", action="store_true")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    parser.add_argument("--memory", choices=[*MEMORY], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.here, options.memory, options.rounds)))
        return
    if unknown := [name for name in options.names if name not in MODELS]:
        parser.error(f"there is no {unknown[0]!r}; there are {', '.join(MODELS)}")
    rows, console = read_rows(ROWS), Console(stderr=True)
    for name in () if options.pages else options.names or MODELS:
        found = list(both_ways(name, options.rounds))
        for row in found:
            console.print(*(row[each] for each in ("model", "memory", "limit", "predicted", "measured")))
        rows = [row for row in rows if row["model"] != name] + found
        rows.sort(key=lambda row: [*MODELS].index(row["model"]))
        write_rows(ROWS, COLUMNS, rows)
    write_part(PAGE, SCRIPT, part(rows))


if __name__ == "__main__":
    main()
