"""What a schedule does with pinned values, read off its executions one by one."""

from __future__ import annotations

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.pins import Pins


def origins(graph: JointGraph, schedule: Schedule) -> list[tuple[int, int, str, str]]:
    """Every read as (reader, value, phase of the reader, phase of the run that made what it reads)."""
    holds: dict[int, str] = {}
    found = []
    for place, op in enumerate(schedule.steps):
        phase = "forward" if place < schedule.num_forward else "backward"
        for value in graph.ops[op].reads:
            if graph.values[value].producer is not None:
                found.append((op, value, phase, holds[value]))
        holds.update(dict.fromkeys(graph.ops[op].writes, phase))
    return found


def broken_promises(graph: JointGraph, schedule: Schedule, pins: Pins) -> list[str]:
    """What a schedule does that pins forbid, found by running it."""
    broken = []
    for op in sorted(pins.must_save):
        runs = [place for place, other in enumerate(schedule.steps) if other == op]
        if len(runs) > 1 or any(place >= schedule.num_forward for place in runs):
            broken.append(f"{op} runs at {runs}")
    for reader, value, phase, made in origins(graph, schedule):
        if graph.values[value].producer in pins.must_recompute and (phase, made) == ("backward", "forward"):
            broken.append(f"{reader} reads {value} as the forward left it")
    return broken
