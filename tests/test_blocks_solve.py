"""Distinct blocks, worker processes, progress; and the description of a block of a chain."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from math import inf
from typing import Any, get_args

import pytest

from hybridremat.blocks import solve
from hybridremat.blocks.pareto import enumerate_options, exact_work, is_solved_exactly
from hybridremat.blocks.problem import bind_block
from hybridremat.blocks.solve import solve_blocks
from hybridremat.blocks.types import BackwardStep, BlockProblem, BlockSolver, Effort, ForwardOp, OptionSet
from hybridremat.blocks.worker import Worker
from hybridremat.errors import GraphSizeError
from hybridremat.graph.joint import JointGraph, Op, Phase, Value
from hybridremat.graph.segmentation.chain import Block, Chain

pytestmark = pytest.mark.full_effort  # processes solve with no other


def layer(width: int) -> BlockProblem:
    ops = tuple(ForwardOp((c - 1,) if c else (), (c,), 3 + c, c % 2) for c in range(5))
    steps = tuple(BackwardStep((4 - j, 3 - j), 9 + j, 0, 5) for j in range(4))
    return BlockProblem((width, 3, 7, 2, 6), ops, steps, frozenset({4}), 6)


PROBLEMS = [layer(4), layer(9), layer(4), layer(6)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[BlockProblem]:
    """The problems that processes are asked for."""
    given: list[BlockProblem] = []
    answer = Worker.solve

    def watched(self: Worker, problem: BlockProblem, *how: Any) -> OptionSet:
        given.append(problem)
        return answer(self, problem, *how)

    monkeypatch.setattr(Worker, "solve", watched)
    return given


def test_same_result_for_any_number_of_workers_wherever_blocks_are_solved(
    asked: list[BlockProblem], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = solve_blocks(PROBLEMS, workers=1)
    assert list(alone) == [layer(4), layer(9), layer(6)]
    assert all(found.options and found.solo for found in alone.values())
    assert solve_blocks(PROBLEMS, workers=2) == alone and not asked  # small ones
    most = exact_work(layer(4))
    monkeypatch.setattr(solve, "LIGHT", most)
    assert solve_blocks(PROBLEMS, workers=2) == alone and not asked  # still small, each
    monkeypatch.setattr(solve, "SMALL", most - 1)
    assert solve_blocks(PROBLEMS, workers=1) == alone and not asked
    assert solve_blocks(PROBLEMS, workers=2) == alone and set(asked) == set(alone)
    asked.clear()
    long = replace(layer(4), ops=layer(4).ops[:3], steps=layer(4).steps[3:], outputs=frozenset({2}))
    assert exact_work(long) < most
    assert solve_blocks([*PROBLEMS, long], workers=2) == alone | solve_blocks([long], workers=1)
    assert set(asked) == set(alone)


def test_blocks_beyond_the_exact_program_are_endless_work() -> None:
    assert exact_work(layer(4), "cp-sat") == inf and 0 < exact_work(layer(4)) < inf


def figures(options: OptionSet) -> list[tuple[int, int, int, int]]:
    return [(o.time, o.saved_bytes, o.backward_peak, o.forward_peak) for o in options.options]


def test_each_solver_solves_and_the_exact_one_misses_nothing(asked: list[BlockProblem]) -> None:
    found = {solver: solve_blocks(PROBLEMS, workers=1, solver=solver) for solver in get_args(BlockSolver)}
    assert found["auto"] == found["exact"]  # small blocks
    for problem in PROBLEMS:
        exact, solved = figures(found["exact"][problem]), figures(found["cp-sat"][problem])
        assert all(any(all(a <= b for a, b in zip(e, s, strict=True)) for e in exact) for s in solved)
        assert found["exact"][problem].unproved == 0 and found["cp-sat"][problem] != found["exact"][problem]
    assert solve_blocks(PROBLEMS[:2], workers=2, solver="cp-sat") == {
        problem: found["cp-sat"][problem] for problem in PROBLEMS[:2]
    }
    assert set(asked) == set(PROBLEMS[:2])


def test_the_exact_solver_refuses_what_it_cannot_hold() -> None:
    effort = Effort(exact_values=2)
    assert is_solved_exactly(layer(4), solver="exact") and not is_solved_exactly(layer(4), solver="cp-sat")
    assert not is_solved_exactly(layer(4), effort, "exact")
    with pytest.raises(GraphSizeError, match=r"a block of 5 ops is too large .* block_solver=\"auto\""):
        enumerate_options(layer(4), effort, "exact")


def test_progress_counts_distinct_blocks() -> None:
    seen: list[tuple[int, int]] = []
    solve_blocks(PROBLEMS, workers=1, on_progress=lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_no_blocks_and_no_workers() -> None:
    assert solve_blocks([]) == {}
    with pytest.raises(ValueError, match="workers must be at least 1, not 0"):
        solve_blocks(PROBLEMS, workers=0)


def test_a_script_without_main_guard_can_use_processes() -> None:
    script = (
        "import sys; from hybridremat.blocks.solve import *; from hybridremat.blocks.types import *\n"
        "def p(w): return BlockProblem((w,), (ForwardOp((), (0,), 1, 0),),"
        " (BackwardStep((0,), 1, 0, 0),), frozenset(), 0)\n"
        "print(len(solve_blocks([p(1), p(2)], workers=2, solver='cp-sat')), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]


# Block 0 makes a (read by block 1), b and c; m (optional) is made from b; a tiny t is always kept.
OPS = (
    Op(0, "f0", Phase.FORWARD, (), (1, 2, 3), time=5, temp=1),
    Op(1, "tiny", Phase.FORWARD, (1,), (4,)),
    Op(2, "f1", Phase.FORWARD, (1,), (5,)),
    Op(3, "mask", Phase.OPTIONAL, (2,), (6,)),
    Op(4, "g1", Phase.BACKWARD, (0, 5), (7,)),
    Op(5, "g0", Phase.BACKWARD, (7, 6), (8, 9), temp=2),
    Op(6, "g0b", Phase.BACKWARD, (8,), (10,)),
)
SIZES = (1, 16, 8, 4, 1, 32, 2, 64, 128, 256, 512)
MAKERS = {v: op.id for op in OPS for v in op.writes}
VALUES = tuple(Value(v, size, MAKERS.get(v), f"v{v}", tangent=v == 0) for v, size in enumerate(SIZES))


def chain(optional: tuple[int, ...] = (3,)) -> Chain:
    graph = JointGraph(OPS, VALUES, gradients=frozenset({9, 10}))
    blocks = (Block((0, 1), optional, (5, 6)), Block((2,), (), (4,)))
    boundary = (frozenset[int](), frozenset({1}), frozenset[int]())
    gradients = (frozenset[int](), frozenset({7}), frozenset[int]())
    return Chain(graph, blocks, boundary, gradients, frozenset({4}))


def test_binding_of_a_block() -> None:
    binding = bind_block(chain(), 0)
    problem = binding.problem
    assert binding.ops == (0, 3)
    assert binding.values == (1, 2, 6)
    assert binding.steps == ((5, 6),)
    assert problem.value_bytes == (16, 8, 2)
    # Value 3 is read by nobody: it counts in the op's temporary.
    assert problem.ops[0] == ForwardOp((), (0, 1), 5, 1 + 4)
    assert problem.ops[1] == ForwardOp((1,), (2,), 0, 0, optional=True)
    assert problem.outputs == {0}
    assert problem.gradient_in == 64
    # 64 in, 128 and 256 out, 2 temporary; then 128 + 256 + 512 with nothing needed; parameter gradients stay.
    assert problem.steps == (BackwardStep((2,), 64 + 128 + 256 + 2, 128 + 256 + 512, 256 + 512),)


def test_binding_names_a_value_that_is_not_kept() -> None:
    with pytest.raises(ValueError, match="block 0: g0 reads v6, made by mask"):
        bind_block(chain(optional=()), 0)


def test_an_optional_value_may_be_handed_down_to_another_block() -> None:
    # Too expensive to be made by both blocks, the optional op stands in the backward of the later one.
    before = chain()
    handed = replace(
        before,
        blocks=(Block((0, 1), (), (5, 6)), Block((2,), (), (4, 3))),
        boundary=(frozenset(), frozenset({1, 2}), frozenset()),
        gradient_boundary=(frozenset(), frozenset({6, 7}), frozenset()),
    )
    assert bind_block(handed, 0).problem.gradient_in == 64 + 2
    with pytest.raises(ValueError, match="block 0: g0 reads v6"):
        bind_block(replace(handed, gradient_boundary=before.gradient_boundary), 0)
