"""Schedules chosen by real steps, where the cost model is wrong on purpose.

    python benchmarks/tune.py [NAME …] [--limit PERCENT] [--steps N] [--wrong SHARE] [--rounds N] [--offload]

Each model is planned by kernel times that are wrong by up to 30 %, in the same way for equal kernels, and
``tune`` compares schedules in 20 steps. Then all of those are measured, turn and turn about, and the table
says how far the planned one, and the one that stays, are from the fastest of them: by the shortest of
``--rounds`` steps, in percent of its time. CPU time of one thread, as other work disturbs it less; with
``--offload``, which moves values to a file by other threads, wall time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

SEED: Final = 1000
MODELS: Final = {"gpt2": 45, "bert": 50, "resnet50": 60, "unet": 45}
"""The built-in model, and its limit in percent of the plain peak."""


def plan_by_wrong_times(share: float) -> None:
    """Let all plans of this process be made by times that are wrong by up to a share."""
    from hybridremat.planning import planner
    from hybridremat.planning.candidates import with_wrong_times

    right = planner.costed

    def wrong(step: Any, context: Any) -> Any:
        step, timings = right(step, context)
        return replace(step, graph=with_wrong_times(step.graph, SEED, share)), timings

    planner.costed = wrong


def measured(call: Any, run: Callable[[], None], clock: Callable[[], float], rounds: int) -> list[float]:
    """The shortest step of each schedule that took turns, in seconds."""
    turns = call.graph_of(call.tuning.plan.fingerprint).turns()
    count = len(call.tuning.plans)
    times: list[list[float]] = [[] for _ in range(count)]
    for _ in range(rounds):
        for number in range(count):
            turns.choose = lambda number=number: number
            started = clock()
            run()
            times[number].append(clock() - started)
    return [min(each) for each in times]


def compared(name: str, limit: int, asked: argparse.Namespace) -> str:
    """One line for a model."""
    import torch

    import hybridremat
    from hybridremat.analysis.measure import loss_of
    from hybridremat.runtime import tune as tuning_of
    from hybridremat.runtime.planned_call import planned_call
    from hybridremat.zoo.models import reference_model

    torch.set_num_threads(1)
    clock = time.perf_counter if asked.offload else time.process_time
    tuning_of.clock_of = lambda _: clock
    model, batch = reference_model(name)
    how = {"offload": f"file:{tempfile.mkdtemp()}"} if asked.offload else {}
    planned = hybridremat.wrap(
        model, kwargs=batch, memory_limit=f"{limit}%", progress=False, cache=False, dynamic=False, **how
    )

    def run() -> None:
        loss_of(planned(**batch)).backward()
        planned.zero_grad()

    run()
    started = time.perf_counter()
    tuning = hybridremat.tune(planned, steps=asked.steps, progress=False)
    took = time.perf_counter() - started
    while not tuning.done:
        run()
    times = measured(planned_call(planned), run, clock, asked.rounds)
    best, record = min(times), tuning.record
    assert record is not None
    away = [f"{seconds / best - 1:.1%}" for seconds in times]
    moved = [len(each.schedule.moves) for each in tuning.plans]
    return (
        f"| {name} | {limit} % | {len(times)} | {took:.0f} s | {away[0]} | {away[record.winner]} | "
        f"{', '.join(away)} | {moved if asked.offload else ''} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(MODELS), metavar="NAME")
    parser.add_argument("--limit", type=int, help="of the plain peak, in place of each model's own")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--wrong", type=float, default=0.3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--offload", action="store_true")
    asked = parser.parse_args()
    plan_by_wrong_times(asked.wrong)
    print("| model | limit | schedules | search | planned | stays | each | moves |")
    for name in asked.names:
        print(compared(name, asked.limit or MODELS[name], asked), flush=True)


if __name__ == "__main__":
    main()
