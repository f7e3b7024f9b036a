"""The block solver against brute force on tiny random blocks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridremat.blocks import pareto
from hybridremat.blocks.lattice import Fusing, Lattice
from hybridremat.blocks.pareto import enumerate_options, swept_options
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.scratch import Scratch
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BackwardStep, BlockProblem, Effort, ForwardOp, Option, OptionSet
from support.brute_blocks import FUSED, SOLVES, SWEEPS, blocks, brute_force, figures, frontier, least_times
from support.examples import examples


@examples(60, suppress_health_check=list(HealthCheck))
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


@examples(60, suppress_health_check=list(HealthCheck))
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


@examples(50, suppress_health_check=list(HealthCheck))
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


@examples(60, suppress_health_check=list(HealthCheck))
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


@examples(60, suppress_health_check=list(HealthCheck))
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
    lattice = Lattice(problem, scale_block(problem), Fusing.EQUAL)
    assert (lattice.values, lattice.members[0]) == (((3,), (0,)), ((0,), (1, 2, 3)))
    fused, single = (enumerate_options(problem, effort) for effort in (FUSED, SWEEPS))
    assert frontier(figures(fused.options)) == frontier(figures(single.options))
    assert frontier(figures(fused.solo)) == frontier(figures(single.solo))


def swept_coarsely(problem: BlockProblem, fusing: Fusing) -> OptionSet | None:
    """The options of a lattice that is as coarse as that; None if its sets do not tell all."""
    lattice = Lattice(problem, scale_block(problem), fusing)
    return swept_options(lattice, SWEEPS, Scratch()) if lattice.exact else None


@examples(60, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("fusing", [Fusing.OPTIONAL, Fusing.COARSE])
@given(problem=blocks())
def test_coarser_lattices_give_ways_to_run_a_block_and_none_that_there_is_not(
    problem: BlockProblem, fusing: Fusing
) -> None:
    found = swept_coarsely(problem, fusing)
    if found is None:
        return
    possible = brute_force(problem, solo=False, copies=3)
    for option in found.options:
        assert simulate_option(problem, option.saved, option.optional_forward, option.recompute) == option
    for saved, peak, time in figures(found.options):
        assert any(s <= saved and p <= peak and t <= time for s, p, t in possible)


def test_which_ops_run_together_with_the_next() -> None:
    # a → b, optional both; then a product, a cheap op, and two that make a mask beside their output
    ops = (
        ForwardOp((), (0,), 1, 0, optional=True),
        ForwardOp((0,), (1,), 1, 0, optional=True),
        ForwardOp((), (2,), 5000, 0),
        ForwardOp((2,), (3, 4), 50, 0),
        ForwardOp((3,), (5,), 40, 0),
        ForwardOp((5,), (6, 7), 50, 0),
    )
    steps = (BackwardStep((6, 7), 0, 0, 0), BackwardStep((3, 4), 0, 0, 0), BackwardStep((1,), 0, 0, 0))
    problem = BlockProblem((8, 8, 8, 8, 2, 8, 8, 2), ops, steps, frozenset(), 0)

    def rows(fusing: Fusing) -> set[tuple[int, ...]]:
        return {row for members in Lattice(problem, scale_block(problem), fusing).members for row in members}

    apart = {(c,) for c in range(6)}
    assert rows(Fusing.NONE) == rows(Fusing.EQUAL) == apart
    assert rows(Fusing.OPTIONAL) == apart - {(0,), (1,)} | {(0, 1)}
    assert rows(Fusing.COARSE) == {(0, 1), (2,), (3,), (4, 5)}


def test_ops_run_together_before_cp_sat_solves_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as it takes to make the table small enough."""
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 1, 0, optional=True) for c in range(8))
    problem = BlockProblem((9,) * 8, ops, (BackwardStep((7,), 0, 0, 0),), frozenset(), 0)
    fusings = Fusing.EQUAL, Fusing.OPTIONAL
    apart, together = (Lattice(problem, scale_block(problem), each) for each in fusings)
    assert together.work < apart.work
    effort = replace(SWEEPS, solved_above=together.work)
    monkeypatch.setattr("hybridremat.blocks.epsilon_constraint.explore_rectangles", lambda *_, **__: 1 / 0)
    coarse, fine = (figures(enumerate_options(problem, each).options) for each in (effort, SWEEPS))
    assert coarse == fine
    with pytest.raises(ZeroDivisionError):
        enumerate_options(problem, replace(effort, solved_above=together.work - 1))
