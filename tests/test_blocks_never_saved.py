"""Values that the backward must not read as the forward left them: every solver against brute force."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from hybridremat.blocks.lattice import Fusing, Lattice
from hybridremat.blocks.pareto import block_structure, enumerate_options, reuse_options
from hybridremat.blocks.scale import scale_block
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BackwardStep, BlockProblem, Effort, ForwardOp, Option
from support.brute_blocks import (
    FUSED,
    SOLVES,
    SWEEPS,
    blocks,
    brute_force,
    figures,
    figures_of,
    frontier,
    least_times,
)
from support.examples import examples

RANDOM = examples(60, suppress_health_check=list(HealthCheck))


@st.composite
def pinned_blocks(draw: st.DrawFn) -> BlockProblem:
    """A block with some of the values that do not leave it barred from being saved."""
    problem = draw(blocks())
    inner = sorted(set(range(len(problem.value_bytes))) - problem.outputs)
    return replace(problem, never_saved=draw(st.frozensets(st.sampled_from(inner))) if inner else frozenset())


def in_time(problem: BlockProblem, options: tuple[Option, ...]) -> tuple[Option, ...]:
    """The options that read nothing barred as the forward left it; the others have to say so."""
    late = [bool(problem.never_saved & reads_from_the_forward(problem, option)) for option in options]
    assert late == [problem.rerun_only(option) for option in options]
    return tuple(option for option, after in zip(options, late, strict=True) if not after)


def reads_from_the_forward(problem: BlockProblem, option: Option) -> set[int]:
    """What the backward reads as the forward left it."""
    made: set[int] = set()
    read: set[int] = set()
    for again, step in zip(option.recompute, problem.steps, strict=True):
        for c in again:
            read |= set(problem.ops[c].reads) - made
            made |= set(problem.ops[c].writes)
        read |= set(step.reads) - made
    return read


@RANDOM
@pytest.mark.parametrize(("effort", "copies"), [(SWEEPS, 3), (SOLVES, 2)], ids=["sweeps", "solves"])
@given(problem=pinned_blocks())
def test_finds_every_nondominated_option(problem: BlockProblem, effort: Effort, copies: int) -> None:
    never = problem.never_saved
    best = frontier(brute_force(problem, solo=False, copies=copies, idle=never))
    if not best:
        with pytest.raises(ValueError, match="no option"):
            enumerate_options(problem, effort)
        return
    found = enumerate_options(problem, effort)
    own = in_time(problem, found.options)
    most = max(peak for _, peak, _ in figures(own))
    assert frontier({p for p in figures(own) if p[1] <= most}) == {p for p in best if p[1] <= most}
    bare = replace(problem, outputs=frozenset(), held_forward=frozenset())
    assert frontier(figures(found.solo)) == frontier(brute_force(bare, solo=True, copies=copies))


@RANDOM
@given(problem=pinned_blocks())
def test_rows_of_ops_lose_no_time_where_the_peak_is_free(problem: BlockProblem) -> None:
    ways = brute_force(problem, solo=False, copies=3, idle=problem.never_saved)
    if ways:
        found = enumerate_options(problem, FUSED)
        assert least_times(figures(in_time(problem, found.options))) == least_times(ways)


@RANDOM
@given(problem=pinned_blocks())
def test_sweeps_find_what_a_block_can_do_that_runs_again(problem: BlockProblem) -> None:
    if brute_force(problem, solo=False, copies=3, idle=problem.never_saved):
        options = enumerate_options(problem, SWEEPS).options
        best = frontier(brute_force(problem, solo=False, copies=3))
        most = max(peak for _, peak, _ in figures(options))
        assert frontier(figures(options)) == {p for p in best if p[1] <= most}


def chain_of_three(never_saved: frozenset[int] = frozenset()) -> BlockProblem:
    """Wide → bent → narrow, as in a feed-forward part; the backward reads the first two."""
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), (40, 1, 40)[c], 0) for c in range(3))
    steps = (BackwardStep((1,), 4, 0, 4), BackwardStep((0,), 4, 0, 0))
    return BlockProblem((8, 8, 2), ops, steps, frozenset({2}), 2, never_saved=never_saved)


@pytest.mark.parametrize("effort", [SWEEPS, FUSED, SOLVES], ids=["sweeps", "fused", "solves"])
def test_the_input_of_a_cheap_op_is_saved_in_place_of_its_output(effort: Effort) -> None:
    problem = chain_of_three(frozenset({1}))
    fastest = in_time(problem, enumerate_options(problem, effort).options)[0]
    assert (fastest.saved, fastest.recompute, fastest.time) == ((0, 2), ((1,), ()), 1)


def test_what_an_op_passes_on_keeps_its_place_where_the_next_ones_output_is_barred() -> None:
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 1, 0) for c in range(2))
    problem = BlockProblem((4, 4), ops, (BackwardStep((1,), 0, 0, 0),), frozenset(), 0)
    barred = replace(problem, never_saved=frozenset({1}))
    assert Lattice(problem, scale_block(problem), Fusing.EQUAL).values == ((1,),)
    assert Lattice(barred, scale_block(barred), Fusing.EQUAL).values == ((0,), (1,))


def test_the_simulator_refuses_a_barred_value_that_crosses() -> None:
    nothing = ((), ())
    assert simulate_option(chain_of_three(), (0, 1), (), nothing).saved == (0, 1, 2)
    with pytest.raises(ValueError, match=r"values \[1\] must not be saved"):
        simulate_option(chain_of_three(frozenset({1})), (0, 1), (), nothing)
    assert figures_of(chain_of_three(), {0}, set(), [(), ()], False, frozenset()) is None


def test_options_are_not_reused_where_other_values_are_barred() -> None:
    free, barred = chain_of_three(), chain_of_three(frozenset({1}))
    assert block_structure(free) != block_structure(barred)
    known = enumerate_options(barred, SWEEPS)
    assert reuse_options(barred, known) == replace(known, solves=0)
