"""The memory of a schedule, found the slow way: nothing here is shared with what it is to check."""

from __future__ import annotations

from hybridremat.graph.joint import JointGraph, Op, Schedule


def naive_profile(graph: JointGraph, schedule: Schedule) -> list[int]:
    """Bytes at every execution: for each copy made so far, ask whether anything still needs it."""
    copies = _Copies(graph, schedule)
    profile = [copies.bytes_at(now, graph.ops[op]) for now, op in enumerate(schedule.steps)]
    for place, each in enumerate(graph.deliveries):
        now = copies.leaves(each.gradient)
        profile[now] = max(profile[now], copies.bytes_after(now, place) + each.workspace)
    return profile


class _Copies:
    """Every copy of every value, by when it is made."""

    def __init__(self, graph: JointGraph, schedule: Schedule) -> None:
        self.graph, self.steps, self.split = graph, schedule.steps, schedule.num_forward
        self.moves = schedule.moves
        self.births = {
            value.id: [now for now, op in enumerate(self.steps) if value.id in graph.ops[op].writes]
            for value in graph.values
        }
        self.parameter_of = {each.gradient: each.parameter for each in graph.deliveries}

    def reads(self, now: int) -> tuple[int, ...]:
        return self.graph.ops[self.steps[now]].reads

    def away(self, value: int, birth: int, now: int) -> bool:
        """Whether a copy is in host memory alone while an execution runs, and until the next one."""
        mine = [each for each in self.moves if (each.value, each.birth) == (value, birth)]
        return any(each.free <= now < each.fetch for each in mine)

    def leaves(self, gradient: int) -> int:
        """When a gradient is read, or its parameter, for the last time."""
        both = {gradient, self.parameter_of[gradient]}
        times = [now for now in range(len(self.steps)) if both.intersection(self.reads(now))]
        return max([self.births[gradient][-1], *times])

    def needed(self, value: int, birth: int, now: int) -> bool:
        copies = self.births[value]
        if value in self.parameter_of and birth == copies[-1]:
            return birth <= now <= self.leaves(value)
        later = [b for b in copies if b > birth]
        readers = range(birth + 1, min(later, default=len(self.steps) - 1) + 1)
        if birth == now or any(r >= now and value in self.reads(r) for r in readers):
            return True
        first, last = birth == copies[0], birth == copies[-1]
        released = first and value in self.graph.released_outputs and now < self.split
        held = first and value in self.graph.held_outputs
        return released or held or (last and value in self.graph.gradients)

    def is_written_over(self, value: int, now: int) -> bool:
        """Whether the copy that execution ``now`` reads has no other use."""
        graph, copies = self.graph, self.births[value]
        birth = max(b for b in copies if b < now)
        ends = graph.released_outputs | graph.held_outputs if birth == copies[0] else frozenset()
        ends |= graph.gradients | frozenset(self.parameter_of) if birth == copies[-1] else frozenset()
        rest = [b for b in copies if b > birth][:1] or [len(self.steps)]
        again = any(value in self.reads(r) for r in range(now + 1, min(rest[0] + 1, len(self.steps))))
        return value not in ends and not again

    def tangents(self, now: int) -> int:
        return sum(value.bytes for value in self.graph.values if value.tangent and now >= self.split)

    def runs(self, op: Op) -> list[int]:
        """The executions of a random op that keeps a state."""
        found = [t for t, o in enumerate(self.steps) if o == op.id]
        return found if op.random and len(found) > 1 else []

    def bytes_at(self, now: int, op: Op) -> int:
        """While an execution runs."""
        total = op.temp + self.tangents(now)
        over = [value for value in op.overwrites if self.is_written_over(value, now)]
        total -= self.graph.values[over[0]].bytes if over else 0
        for value in self.graph.values:
            copies = [b for b in self.births[value.id] if b <= now and self.needed(value.id, b, now)]
            total += value.bytes * sum(not self.away(value.id, b, now) for b in copies)
        for other in self.graph.ops:
            runs = self.runs(other)
            if runs and runs[0] <= now <= runs[-1]:
                total += self.graph.rng_state_bytes * (2 if other is op and now > runs[0] else 1)
        return total

    def bytes_after(self, now: int, place: int) -> int:
        """When an execution is over, while delivery ``place`` happens: the earlier ones of then are gone."""
        total = self.tangents(now)
        for value in self.graph.values:
            if value.id not in self.parameter_of or self.births[value.id][-1] > now:
                copies = [b for b in self.births[value.id] if b <= now and self.needed(value.id, b, now + 1)]
                total += value.bytes * sum(not self.away(value.id, b, now) for b in copies)
        for number, each in enumerate(self.graph.deliveries):
            leaves = self.leaves(each.gradient)
            waits = self.births[each.gradient][-1] <= now < leaves
            if waits or (leaves == now and number >= place):
                total += self.graph.values[each.gradient].bytes
        for op in self.graph.ops:
            runs = self.runs(op)
            total += self.graph.rng_state_bytes if runs and runs[0] <= now < runs[-1] else 0
        return total


def naive_saved(graph: JointGraph, schedule: Schedule) -> int:
    """Bytes of all copies made in the forward, and of generator states, that the backward needs."""
    copies, split = _Copies(graph, schedule), schedule.num_forward
    ends = len(schedule.steps)
    total = 0
    for value in graph.values:
        for birth in (b for b in copies.births[value.id] if b < split):
            kept = value.id in graph.held_outputs and birth == copies.births[value.id][0]
            last = value.id in graph.gradients and birth == copies.births[value.id][-1]
            needed = any(copies.needed(value.id, birth, now) for now in range(split, ends))
            moves = any((each.value, each.birth) == (value.id, birth) for each in schedule.moves)
            total += value.bytes * ((needed or kept or last) and not moves)
    for op in graph.ops:
        runs = copies.runs(op)
        total += graph.rng_state_bytes * bool(runs and runs[0] < split <= runs[-1])
    return total


def naive_between(graph: JointGraph, schedule: Schedule) -> int:
    """Bytes between the phases, with the outputs that the caller drops later."""
    copies, split = _Copies(graph, schedule), schedule.num_forward
    first = {value: copies.births[value][0] for value in graph.released_outputs}
    dropped = (v for v, birth in first.items() if birth < split and not copies.needed(v, birth, split))
    return naive_saved(graph, schedule) + sum(graph.values[value].bytes for value in dropped)
