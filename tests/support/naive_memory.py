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

    def is_written_over(value: int, now: int) -> bool:
        """Whether the copy that execution ``now`` reads has no other use, and is of its own phase."""
        birth = max(b for b in births[value] if b < now)
        ends = graph.released_outputs | graph.held_outputs if birth == births[value][0] else frozenset()
        ends |= graph.gradients if birth == births[value][-1] else frozenset()
        rest = [b for b in births[value] if b > birth][:1] or [len(steps)]
        again = any(value in graph.ops[steps[r]].reads for r in range(now + 1, min(rest[0] + 1, len(steps))))
        return value not in ends and not again and (birth < split) == (now < split)

    profile = []
    for now, op_id in enumerate(steps):
        op = graph.ops[op_id]
        total = op.temp
        over = [value for value in op.overwrites if is_written_over(value, now)]
        total -= graph.values[over[0]].bytes if over else 0
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
