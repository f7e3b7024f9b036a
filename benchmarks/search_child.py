"""What planning one model takes and wins, in a process of its own: CPU seconds of it and its children.

    python benchmarks/search_child.py KIND NAME COSTS

``KIND`` is ``zoo`` (a built-in model), ``case`` (a line of the compatibility table) or ``net`` (a net of
``search_nets.py``). The step is captured once, its costs are measured once for ``COSTS``, and then it is
planned under each limit by blocks that are new. Prints rows as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final


def cpu_seconds() -> float:
    """CPU seconds of this process, and of its children that have ended."""
    return sum(os.times()[:4])


time.perf_counter = cpu_seconds  # planning times its stages by this clock

import torch  # noqa: E402  (after the clock)

from hybridremat.errors import InfeasibleLimitError  # noqa: E402
from hybridremat.graph.joint import plain_schedule  # noqa: E402
from hybridremat.planning import pipeline, planner  # noqa: E402
from hybridremat.planning.chosen import Chosen  # noqa: E402
from hybridremat.planning.context import PlanContext  # noqa: E402
from hybridremat.planning.option_cache import OptionCache  # noqa: E402
from hybridremat.planning.settings import Settings  # noqa: E402
from hybridremat.planning.stages import plain_point  # noqa: E402
from hybridremat.planning.step_costs import costed  # noqa: E402

SHARES: Final = ("80%", "60%", "40%")
LONG_STEP: Final = 0.1
"""Seconds: plans of longer steps are held against those of a search without a bound."""


def made(kind: str, name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and the keyword arguments of its step."""
    torch.manual_seed(0)
    if kind == "zoo":
        from hybridremat.zoo.models import reference_model

        return reference_model(name, 0.0, {})
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    if kind == "net":
        import search_nets

        return search_nets.NETS[name]()
    from support.compat.every_case import EVERY

    case = next(case for case in EVERY if case.name == name)
    if "graph_breaks" in case.how:
        raise SystemExit(f"{name} comes in several graphs, each of which is planned as others here")
    return case.fresh()


def planned(step: Any, limit: str | int, costs: str, budget: str | None) -> tuple[dict[str, Any], int]:
    """The figures of a plan, and the least limit that it names."""
    planner.OPTIONS = OptionCache()
    asked = Settings(memory_limit=limit, cost_model=costs, planning_budget=budget, cache=False)
    context, started = PlanContext.of(asked.validated(need_limit=True)), cpu_seconds()
    try:
        plan = planner.make_plan(step, {}, context, on_infeasible="error")
    except InfeasibleLimitError as error:
        return {"seconds": cpu_seconds() - started}, error.least or 0
    stages = {stage: round(seconds, 2) for stage, seconds in plan.timings.items()}
    found = {"seconds": cpu_seconds() - started, "overhead": plan.overhead, "stages": stages}
    return found, plan.least_peak


def rows(kind: str, name: str, costs: str) -> Iterator[dict[str, Any]]:
    """A row for each limit; one below the least is not searched."""
    model, batch = made(kind, name)
    taken: dict[str, Any] = {}
    context = PlanContext.of(Settings(memory_limit="100%", cost_model=costs).validated(need_limit=True))

    def choose(traced: Any) -> Chosen:
        taken["capture"] = cpu_seconds() - started
        begun = cpu_seconds()
        taken["step"], _ = costed(traced, context)
        taken["costs"] = cpu_seconds() - begun
        return Chosen(taken["step"], plain_schedule(taken["step"].graph))

    started = cpu_seconds()
    pipeline.plan_step(model.train(), (), batch, replace(context, build=False), choose=choose)
    graph = taken["step"].graph
    plain = plain_point(graph)
    about = {"ops": len(graph.ops), "step": plain.time / 1e9, "share": 0.0}
    about |= {stage: taken[stage] for stage in ("capture", "costs")}
    _, least = planned(taken["step"], "100%", costs, None)
    for limit in (*SHARES, least):
        if isinstance(limit, str) and int(limit[:-1]) * plain.peak < 100 * least:
            yield about | {"limit": limit, "share": least / plain.peak}
            continue
        found, _ = planned(taken["step"], limit, costs, None)
        if "overhead" in found and plain.time / 1e9 >= LONG_STEP:
            whole, _ = planned(taken["step"], limit, costs, "unlimited")
            found |= {"whole": whole.get("overhead"), "whole_seconds": whole["seconds"]}
        named = limit if isinstance(limit, str) else "least"
        yield about | found | {"limit": named, "share": least / plain.peak}


def main() -> None:
    """Measure what the arguments name."""
    kind, name, costs = sys.argv[1:]
    torch.set_num_threads(1)
    print(json.dumps(list(rows(kind, name, costs))))


if __name__ == "__main__":
    main()
