"""The block solver against brute force on tiny random blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridremat.blocks import pareto
from hybridremat.blocks.lattice import Lattice
from hybridremat.blocks.pareto import enumerate_options
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BackwardStep, BlockProblem, Effort, ForwardOp, Option

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


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize(("effort", "copies"), [(SWEEPS, 3), (SOLVES, 2)], ids=["sweeps", "solves"])
@given(problem=blocks())
def test_finds_every_nondominated_option(problem: BlockProblem, effort: Effort, copies: int) -> None:
    ordinary = frontier(brute_force(problem, solo=False, copies=copies))
    if not ordinary:
        with pytest.raises(ValueError, match="no option"):
            enumerate_options(problem, effort)
        return
    found = enumerate_options(problem, effort)
    # The search stops at the peak that the fastest and the leanest option need.
    most = max(peak for _, peak, _ in figures(found.options))
    assert frontier(figures(found.options)) == {p for p in ordinary if p[1] <= most}
    bare = BlockProblem(problem.value_bytes, problem.ops, problem.steps, frozenset(), problem.gradient_in)
    assert frontier(figures(found.solo)) == frontier(brute_force(bare, solo=True, copies=copies))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=blocks(), data=st.data())
def test_finds_every_option_that_leaves_far_outputs_alone(problem: BlockProblem, data: st.DataObject) -> None:
    if not problem.outputs or not frontier(brute_force(problem, solo=False, copies=3)):
        return
    far = data.draw(st.frozensets(st.sampled_from(sorted(problem.outputs)), min_size=1))
    found = enumerate_options(replace(problem, skip_values=far), SWEEPS)
    for idle in (frozenset[int](), *(frozenset({d}) for d in far), far):
        options = tuple(o for o in found.options if o.idle >= idle)
        best = frontier(brute_force(problem, solo=False, copies=3, idle=idle))
        most = max((peak for _, peak, _ in figures(options)), default=0)
        assert bool(options) == bool(best)
        assert frontier(figures(options)) == {p for p in best if p[1] <= most}


def lasting(problem: BlockProblem) -> BlockProblem:
    """The same block with gradients that stay alive until a step has run, as those of real blocks do."""
    steps: list[BackwardStep] = []
    alive = problem.gradient_in
    for step in problem.steps:
        steps.append(replace(step, during=max(step.during, alive)))
        alive = step.after
    return replace(problem, steps=tuple(steps))


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=blocks().map(lasting))
def test_sweeps_and_solves_agree(problem: BlockProblem) -> None:
    def least(options: tuple[Option, ...], saved: int, peak: int) -> int | None:
        return min((t for s, p, t in figures(options) if s <= saved and p <= peak), default=None)

    try:
        sweeps = enumerate_options(problem, SWEEPS)
    except ValueError:
        with pytest.raises(ValueError, match="no option"):
            enumerate_options(problem, SOLVES)
        return
    solves = enumerate_options(problem, SOLVES)
    # CP-SAT computes an op at most twice again unless there is no other way
    twice = [
        o for o in sweeps.options if max(Counter(c for cs in o.recompute for c in cs).values(), default=0) < 3
    ]
    for saved, peak, time in frontier(figures(solves.options)):
        assert least(sweeps.options, saved, peak) == time
    # and stops at the peak that its fastest and its leanest option need
    most = max(peak for _, peak, _ in figures(solves.options))
    for saved, peak, time in frontier(figures(sweeps.options)) & figures(tuple(twice)):
        assert peak > most or least(solves.options, saved, peak) == time


@pytest.mark.parametrize("effort", [Effort(solved_above=1), Effort(most_values=1)], ids=["work", "values"])
def test_blocks_too_large_for_a_lattice_are_solved(effort: Effort, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 1 + c, 2) for c in range(4))
    steps = tuple(BackwardStep((c,), 3, 0, 3) for c in reversed(range(4)))
    problem = BlockProblem((4, 9, 9, 5), ops, steps, frozenset({3}), 2)
    swept = enumerate_options(problem, SWEEPS)
    monkeypatch.setattr(pareto, "explore_peak_limits", lambda *_, **__: pytest.fail("swept"))
    solved = enumerate_options(problem, replace(effort, resolution=0.0, tolerance=0.0, solves=400))
    assert solved.solves > 0
    assert frontier(figures(solved.options)) == frontier(figures(swept.options))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize(
    "effort", [Effort(), FUSED, Effort(solved_above=0)], ids=["sweeps", "fused", "solves"]
)
@given(problem=blocks())
def test_simulator_accepts_every_option(problem: BlockProblem, effort: Effort) -> None:
    try:
        found = enumerate_options(problem, effort)
    except ValueError:
        return
    for option in found.options:
        assert simulate_option(problem, option.saved, option.optional_forward, option.recompute) == option
        assert problem.outputs <= set(option.saved)
    for option in found.solo:
        assert simulate_option(problem, (), (), option.recompute, solo=True) == option
        assert option.saved_bytes == option.forward_peak == 0


def least_times(points: set[Figures]) -> list[tuple[int, int]]:
    """Saved bytes and least time, whatever the peak."""
    lean: list[tuple[int, int]] = []
    for saved, time in sorted((saved, time) for saved, _, time in points):
        if not lean or time < lean[-1][1]:
            lean.append((saved, time))
    return lean


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problem=blocks())
def test_rows_of_ops_lose_no_time_where_the_peak_is_free(problem: BlockProblem) -> None:
    ordinary = brute_force(problem, solo=False, copies=3)
    if ordinary:
        found = enumerate_options(problem, FUSED)
        assert least_times(figures(found.options)) == least_times(ordinary)


def test_rows_of_ops_keep_what_is_between_them_out_of_the_lattice() -> None:
    # a (4) → b (9) → c (9) → d (5); the backward reads d and a: b and c only lead to d.
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 1 + c, 2 if c == 2 else 0) for c in range(4))
    steps = (BackwardStep((3,), 3, 0, 3), BackwardStep((0,), 1, 0, 0))
    problem = BlockProblem((4, 9, 9, 5), ops, steps, frozenset(), 2)
    lattice = Lattice(problem, scale_block(problem), fused=True)
    assert (lattice.values, lattice.members[0]) == (((3,), (0,)), ((0,), (1, 2, 3)))
    fused, single = (enumerate_options(problem, effort) for effort in (FUSED, SWEEPS))
    assert frontier(figures(fused.options)) == frontier(figures(single.options))
    assert frontier(figures(fused.solo)) == frontier(figures(single.solo))
