"""Schedules chosen by real steps, where the cost model is wrong on purpose.

    python benchmarks/tune.py [CASE …] [--pages]

Each of :data:`CASES` is planned by kernel times that are wrong by up to 30 %, in the same way for equal
kernels, and ``tune`` compares schedules in 20 steps. Then all of those are measured, turn and turn about,
and the table says how far the planned one, and the one that stays, are from the fastest of them: by the
shortest of some steps, in percent of its time. CPU time of one thread, as other work disturbs it less; where
values are moved to a file by other threads, wall time. Rows go to ``data/tune.csv`` as they come, what is
missing without CASE, and those of CASE anew; the table from them to docs/benchmarks.md; ``--pages`` does only
that. Rows without a load are those of 2026-11-26, taken over from the page as it stood.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from generated import Row, circumstances, days, gone_on, loads, task_options, versions, write_part
from marks import DATA
from reference import PAGE, made, title


class Case(NamedTuple):
    """A reference model, its limit in percent of the plain peak, and whether values may move to a file."""

    model: str
    limit: int
    offload: bool = False


SCRIPT: Final = "tune.py"
ROWS: Final = DATA / "tune.csv"
COLUMNS: Final = ("case", "longer", "moves", "stays", "load", "date", "torch")
CASES: Final[Mapping[str, Case]] = {
    "gpt2": Case("gpt2", 45),
    "bert": Case("bert", 50),
    "resnet50": Case("resnet50", 60),
    "unet": Case("unet", 45),
    "gpt2-offload": Case("gpt2", 40, offload=True),
}
SEED: Final = 1000
WRONG: Final = 0.3
STEPS, ROUNDS = 20, 12


def plan_by_wrong_times(share: float) -> None:
    """Let all plans of this process be made by times that are wrong by up to a share."""
    from hybridremat.planning import planner
    from hybridremat.planning.candidates import with_wrong_times

    right = planner.costed

    def wrong(step: Any, context: Any) -> Any:
        step, timings = right(step, context)
        return replace(step, graph=with_wrong_times(step.graph, SEED, share)), timings

    planner.costed = wrong


def measured(call: Any, run: Callable[[], None], clock: Callable[[], float]) -> list[float]:
    """The shortest step of each schedule that took turns, in seconds."""
    turns = call.graph_of(call.tuning.plan.fingerprint).turns()
    count = len(call.tuning.plans)
    times: list[list[float]] = [[] for _ in range(count)]
    for _ in range(ROUNDS):
        for number in range(count):
            turns.choose = lambda number=number: number
            started = clock()
            run()
            times[number].append(clock() - started)
    return [min(each) for each in times]


def compared(name: str) -> Row:
    """Of each schedule, the planned one first, how much longer than the fastest one's a step is, in percent.

    And how many values each moves, and the number of the schedule that stays.
    """
    import torch

    import hybridremat
    from hybridremat.analysis.measure import loss_of
    from hybridremat.runtime import tune as tuning_of
    from hybridremat.runtime.planned_call import planned_call

    torch.set_num_threads(1)
    case = CASES[name]
    clock = time.perf_counter if case.offload else time.process_time
    tuning_of.clock_of = lambda _: clock
    model, batch = made(case.model)
    with tempfile.TemporaryDirectory() as folder:
        how = {"offload": f"file:{folder}"} if case.offload else {}
        planned = hybridremat.wrap(
            model,
            kwargs=batch,
            memory_limit=f"{case.limit}%",
            progress=False,
            cache=False,
            dynamic=False,
            **how,
        )

        def run() -> None:
            loss_of(planned(**batch)).backward()
            planned.zero_grad()

        run()
        tuning = hybridremat.tune(planned, steps=STEPS, progress=False)
        while not tuning.done:
            run()
        times = measured(planned_call(planned), run, clock)
    record = tuning.record
    assert record is not None
    return {
        "longer": json.dumps([round(100 * (seconds / min(times) - 1), 1) for seconds in times]),
        "moves": json.dumps([len(each.schedule.moves) for each in tuning.plans]),
        "stays": record.winner,
    }


def row(name: str) -> Row:
    """The row of one case, made in this process."""
    plan_by_wrong_times(WRONG)
    load = os.getloadavg()[0]
    return {"case": name, **compared(name), **circumstances(load)}


def part(rows: Sequence[Row]) -> str:
    """What the script writes into the page."""
    return "\n".join((described(rows), "", *table(rows)))


def described(rows: Sequence[Row]) -> str:
    """What stands above the table."""
    return (
        f"`python benchmarks/tune.py`: {days(rows)}, {versions(rows)}, one thread, 2 cores with "
        f"{loads(rows)}, CPU time (with `offload=` to a file: wall time). Plans were made by kernel times "
        f"that are wrong by up to {100 * WRONG:.0f} % on purpose; [`tune`](tune.md) then had {STEPS} steps, "
        "in which the schedules took turns. Listed is how much longer each schedule's shortest of "
        f"{ROUNDS} further steps was than the fastest one's, the planned one first."
    )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The table of the page."""
    yield "| model | limit | each schedule | stays |"
    yield "|---|---|---|---|"
    by_name = {each["case"]: each for each in rows}
    for name, case in ((name, case) for name, case in CASES.items() if name in by_name):
        found = by_name[name]
        longer, moves, stays = (json.loads(found[column]) for column in ("longer", "moves", "stays"))
        moved = f" ({', '.join(map(str, moves))} moves)" if case.offload else ""
        model = title(case.model) + (", `offload=`" if case.offload else "")
        each = ", ".join(f"{more:.1f}" for more in longer) + f" %{moved}"
        kept = f"{longer[stays]:.1f} % ({'another' if stays else 'the planned one'})"
        yield f"| {model} | {case.limit} % | {each} | {kept} |"


def main() -> None:
    """Measure what is asked for, write the page."""
    options = task_options(__doc__, [*CASES])
    if options.here:
        print(json.dumps([row(*options.here)]))
        return
    tasks = [(name,) for name in options.names]
    write_part(PAGE, SCRIPT, part(gone_on(__file__, ROWS, COLUMNS, tasks, again=options.again)))


if __name__ == "__main__":
    main()
