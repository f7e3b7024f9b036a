"""Small random blocks, and every choice in them, found by brute force without the code that is judged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

from hypothesis import strategies as st

from hybridremat.blocks.pareto import Effort
from hybridremat.blocks.types import BackwardStep, BlockProblem, ForwardOp, Option

SIZES = st.integers(1, 6)
SWEEPS = Effort(limits=10_000, limit_resolution=0.0, tolerance=0.0)
FUSED = Effort(limits=10_000, limit_resolution=0.0, tolerance=0.0, fused_above=0)
SOLVES = Effort(solves=400, solo_solves=100, resolution=0.0, tolerance=0.0, solved_above=0)


@st.composite
def blocks(draw: st.DrawFn) -> BlockProblem:
    """Up to four ops with one or two outputs and up to three backward steps."""
    ops: list[ForwardOp] = []
    value_bytes: list[int] = []
    for _ in range(draw(st.integers(1, 4))):
        made = range(len(value_bytes))
        reads = draw(st.sets(st.sampled_from(made), max_size=2)) if made else set()
        writes = [len(value_bytes) + k for k in range(draw(st.integers(1, 2)))]
        value_bytes += [draw(SIZES) for _ in writes]
        optional = draw(st.integers(0, 4)) == 0
        # A forward op never reads what an optional op makes: it would not be optional then.
        if not optional:
            reads = {d for d in reads if not any(d in op.writes and op.optional for op in ops)}
        recomputable = optional or draw(st.integers(0, 5)) > 0
        ops.append(
            ForwardOp(
                tuple(sorted(reads)),
                tuple(writes),
                draw(st.integers(1, 5)),
                draw(st.integers(0, 3)),
                optional,
                recomputable,
            )
        )
    every = range(len(value_bytes))
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        after = draw(st.integers(0, 3))
        reads = draw(st.sets(st.sampled_from(every), max_size=2))
        during, tail = after + draw(st.integers(0, 3)), draw(st.sampled_from((0, after)))
        steps.append(BackwardStep(tuple(sorted(reads)), during, tail, after))
    forward = [d for op in ops if not op.optional for d in op.writes]
    outputs = draw(st.frozensets(st.sampled_from(forward), max_size=2)) if forward else frozenset()
    held = draw(st.frozensets(st.sampled_from(forward), max_size=1)) if forward else frozenset()
    return BlockProblem(
        tuple(value_bytes), tuple(ops), tuple(steps), outputs, draw(st.integers(0, 3)), held - outputs
    )


def subsets(items: list[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(items) + 1):
        yield from combinations(items, size)


Figures = tuple[int, int, int]


def figures_of(  # noqa: C901 - one plain scan, kept apart from the code it judges
    problem: BlockProblem,
    saved: set[int],
    early: set[int],
    again: list[tuple[int, ...]],
    solo: bool,
    idle: frozenset[int],
) -> Figures | None:
    """(saved bytes, peak of either phase, time) by scanning every instant for what a later reader needs."""
    readable = (saved | problem.outputs) - idle
    timeline: list[tuple[str, int, int]] = []
    if not solo:
        timeline += [("op", c, 0) for c, op in enumerate(problem.ops) if not op.optional or c in early]
    split, gradient = len(timeline), problem.gradient_in
    for j, step in enumerate(problem.steps):
        timeline += [("op", c, gradient) for c in again[j]]
        timeline += [("step", j, step.during), ("tail", j, max(step.tail, step.after))]
        gradient = step.after

    def touches(place: int, what: str, d: int) -> bool:
        kind, index, _ = timeline[place]
        if kind == "tail":
            return False
        if what == "writes":
            return kind == "op" and d in problem.ops[index].writes
        return d in (problem.ops[index].reads if kind == "op" else problem.steps[index].reads)

    use = [0] * len(timeline)
    crossing = 0
    for d, size in enumerate(problem.value_bytes):
        births = [t for t in range(len(timeline)) if touches(t, "writes", d)]
        for t in range(len(timeline)):
            if touches(t, "reads", d):
                before = [b for b in births if b < t]
                if not before or (before[-1] < split <= t and d not in readable):
                    return None
        for birth in births:
            end = min([b for b in births if b > birth], default=len(timeline))
            last = max([t for t in range(birth, end) if touches(t, "reads", d)], default=birth)
            if birth < split and d in problem.outputs | problem.held_forward:
                last = max(last, split - 1)
            crossing += size if birth < split and (last >= split or d in problem.outputs) else 0
            for t in range(birth, last + 1):
                use[t] += size
    for t, (kind, index, extra) in enumerate(timeline):
        use[t] += extra + (problem.ops[index].temp if kind == "op" else 0)
    time = sum(problem.ops[c].time for cs in again for c in cs)
    time += 0 if solo else sum(problem.ops[c].time for c in early)
    return crossing, max(use, default=0), time


def needed(problem: BlockProblem, j: int) -> set[int]:
    """Values that step j reads, and those that rebuilding them reads in turn."""
    values = set(problem.steps[j].reads)
    while True:
        more = {d for op in problem.ops if values & set(op.writes) for d in op.reads}
        if more <= values:
            return values
        values |= more


def brute_force(
    problem: BlockProblem, *, solo: bool, copies: int, idle: frozenset[int] = frozenset()
) -> set[Figures]:
    """Every choice that recomputes an op at most ``copies`` times, each time before a step that needs it.

    The backward leaves what the forward made of the outputs ``idle`` alone.
    """
    found = set()
    count, stages = len(problem.ops), len(problem.steps)
    optional = [c for c in range(count) if problem.ops[c].optional]
    for early in [()] if solo else subsets(optional):
        places = []
        for op in problem.ops:
            wanted = [j for j in range(stages) if set(op.writes) & needed(problem, j)]
            places.append([s for s in subsets(wanted) if len(s) <= (copies if op.recomputable else 0)])
        for choice in product(*places):
            again = [tuple(c for c in range(count) if j in choice[c]) for j in range(stages)]
            ran = {c for c in range(count) if not problem.ops[c].optional or c in early}
            # Saved is then just what the backward reads from the forward: anything else could go.
            saved = set() if solo else {d for c in ran for d in problem.ops[c].writes}
            figures = figures_of(problem, saved, set(early), again, solo, idle)
            if figures is not None:
                found.add(figures)
    return found


def frontier(points: set[Figures]) -> set[Figures]:
    """Nondominated figures."""
    return {
        p
        for p in points
        if not any(q != p and all(a <= b for a, b in zip(q, p, strict=True)) for q in points)
    }


def figures(options: tuple[Option, ...]) -> set[Figures]:
    return {(o.saved_bytes, max(o.forward_peak, o.backward_peak), o.time) for o in options}


def least_times(points: set[Figures]) -> list[tuple[int, int]]:
    """Saved bytes and least time, whatever the peak."""
    lean: list[tuple[int, int]] = []
    for saved, time in sorted((saved, time) for saved, _, time in points):
        if not lean or time < lean[-1][1]:
            lean.append((saved, time))
    return lean
