"""Repair schedules that do not obey the user's pins.

Chains know the pins, so most of their schedules obey. What a chain cannot express is repaired here, on the
flat schedule: a value that crosses a cut and must be made again, an optional op that must be kept although
what it is made of must not. The plain step becomes the fastest of all steps that obey.
"""

from __future__ import annotations

from collections.abc import Iterable

from hybridremat.graph.joint import JointGraph, Phase, Schedule
from hybridremat.graph.pins import Pins, obeys
from hybridremat.sequence.dead_code import DeadCodeElimination


class PinRepair:
    """Repairs schedules of one graph; ``rebuilt`` as in ``DeadCodeElimination``."""

    def __init__(self, graph: JointGraph, pins: Pins, rebuilt: frozenset[int] = frozenset()) -> None:
        self._graph, self._pins = graph, pins
        self._remove_dead = DeadCodeElimination(graph, rebuilt)
        self._recomputed = pins.recomputed_values(graph)
        self._once = pins.must_save.union(op.id for op in graph.ops if not op.recomputable)
        self._saved_optional = self._optional_sources(pins.must_save)

    def __call__(self, schedule: Schedule) -> Schedule:
        """The schedule itself if it obeys, else one that does: as close to it as may be."""
        if obeys(self._graph, schedule, self._pins):
            return schedule
        forward = self._forward(schedule.steps[: schedule.num_forward])
        backward = self._backward(schedule.steps[schedule.num_forward :], set(forward))
        return self._remove_dead(Schedule((*forward, *backward), len(forward)))

    def _optional_sources(self, ops: Iterable[int]) -> frozenset[int]:
        """The optional ops among ``ops``, and those that they are made of."""
        graph = self._graph
        found = {op for op in ops if graph.ops[op].phase is Phase.OPTIONAL}
        for op in reversed(graph.ops):
            if op.id in found:
                made = (graph.producer(value) for value in op.reads)
                found.update(m.id for m in made if m is not None and m.phase is Phase.OPTIONAL)
        return frozenset(found)

    def _forward(self, steps: Iterable[int]) -> list[int]:
        """Saved ops once, the optional ones among them as soon as what they read is there."""
        ops, steps = self._graph.ops, tuple(steps)
        waiting = sorted(self._saved_optional.difference(steps))
        ran: list[int] = []
        missing = {value for op in steps for value in ops[op].writes}
        missing.update(value for op in waiting for value in ops[op].writes)

        def run(op: int) -> None:
            ran.append(op)
            missing.difference_update(ops[op].writes)

        done: set[int] = set()
        for op in steps:
            if op in self._once and op in done:
                continue
            run(op)
            done.add(op)
            for late in tuple(waiting):  # what one of them makes may be what the next one waits for
                if missing.isdisjoint(ops[late].reads):
                    run(late)
                    waiting.remove(late)
        return ran

    def _backward(self, steps: Iterable[int], ran: set[int]) -> list[int]:
        """No op that must be saved, and every value that must be recomputed made before its first reader."""
        ops, done = self._graph.ops, ran & self._once
        stale = set(self._recomputed)
        result: list[int] = []
        for op in steps:
            if op in done:
                continue
            for made in (*self._sources(op, stale), op):
                result.append(made)
                stale.difference_update(ops[made].writes)
                if made in self._once:
                    done.add(made)
        return result

    def _sources(self, op: int, stale: set[int]) -> list[int]:
        """The ops that have to run again before ``op``, in order."""
        graph = self._graph
        needed: set[int] = set()
        pending = [op]
        while pending:
            for value in stale.intersection(graph.ops[pending.pop()].reads):
                producer = graph.values[value].producer
                assert producer is not None
                if producer not in needed:
                    needed.add(producer)
                    pending.append(producer)
        return sorted(needed)
