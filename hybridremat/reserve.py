"""What the step needs if the caller's own code takes memory between forward and backward.

That code (a loss outside the model) has nothing while the model's forward runs. Between the phases it has
up to ``reserve`` bytes beside what the forward left. When the model's backward starts, the gradients of the
outputs are part of what it had, and they are counted in the graph; the rest may still be held.
"""

from __future__ import annotations

from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.memory import step_memory


def needed_bytes(
    *, forward_peak: int, backward_peak: int, between: int, reserve: int, tangent_bytes: int
) -> int:
    """Most step memory in bytes if the caller takes up to ``reserve`` above ``between`` the phases."""
    if not reserve:
        return max(forward_peak, backward_peak)
    held = max(0, reserve - tangent_bytes)
    return max(forward_peak, between + reserve, backward_peak + held)


def tangent_bytes(graph: JointGraph) -> int:
    """Bytes of the gradients that the backward is given."""
    return sum(value.bytes for value in graph.values if value.tangent)


def schedule_needs(graph: JointGraph, schedule: Schedule, reserve: int) -> int:
    """:func:`needed_bytes` of a schedule, outputs taken to be alive between the phases."""
    memory = step_memory(graph, schedule)
    released = sum(graph.values[value].bytes for value in graph.released_outputs)
    split = schedule.num_forward
    return needed_bytes(
        forward_peak=max(memory.profile[:split], default=0),
        backward_peak=max(memory.profile[split:], default=0),
        between=memory.saved + released,
        reserve=reserve,
        tangent_bytes=tangent_bytes(graph),
    )
