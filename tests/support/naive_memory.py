"""The memory of a schedule, found the slow way: nothing here is shared with what it is to check."""

from __future__ import annotations

from hybridremat.graph.joint import JointGraph, Schedule


def naive_profile(graph: JointGraph, schedule: Schedule) -> list[int]:
    """Bytes at every execution: for each copy made so far, ask whether anything still needs it."""
    steps, split = schedule.steps, schedule.num_forward
    births = {
        value.id: [now for now, op in enumerate(steps) if value.id in graph.ops[op].writes]
        for value in graph.values
    }

    def needed(value: int, birth: int, now: int) -> bool:
        copies = births[value]
        later = [b for b in copies if b > birth]
        readers = range(birth + 1, min(later, default=len(steps) - 1) + 1)
        if birth == now or any(r >= now and value in graph.ops[steps[r]].reads for r in readers):
            return True
        first, last = birth == copies[0], birth == copies[-1]
        released = first and value in graph.released_outputs and now < split
        return released or (first and value in graph.held_outputs) or (last and value in graph.gradients)

    profile = []
    for now, op_id in enumerate(steps):
        op = graph.ops[op_id]
        total = op.temp
        for value in graph.values:
            if value.tangent and now >= split:
                total += value.bytes
            total += sum(value.bytes for b in births[value.id] if b <= now and needed(value.id, b, now))
        for other in graph.ops:
            runs = [t for t, o in enumerate(steps) if o == other.id]
            if other.random and len(runs) > 1 and runs[0] <= now <= runs[-1]:
                total += graph.rng_state_bytes * (2 if other is op and now > runs[0] else 1)
        profile.append(total)
    return profile
