"""Room for frames: what a step is captured and planned in."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from hybridremat.compiler import frame_room
from hybridremat.compiler.frame_room import with_room
from hybridremat.planning import planner
from support.training import small
from support.wrapping import wrap


def test_a_function_with_room_takes_and_returns_what_it_did() -> None:
    def sums(first: int, second: int = 2, *, third: int = 3) -> int:
        """Adds."""
        return 1 // 0 if third < 0 else first + second + third + len(closed)

    closed = "ab"
    roomy = with_room(sums)
    assert (roomy(1), roomy(1, 5, third=7), roomy.__name__, roomy.__doc__) == (8, 15, "sums", "Adds.")
    with pytest.raises(ZeroDivisionError):
        roomy(0, third=-1)


def test_steps_are_captured_and_planned_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_graph, room = planner.plan_graph, []

    def watched(*args, **how):
        frame = sys._getframe()
        while frame is not None:
            room.append(frame.f_code.co_stacksize)
            frame = frame.f_back
        return plan_graph(*args, **how)

    monkeypatch.setattr(planner, "plan_graph", watched)
    model, batch = small("mlp")
    wrap(model, batch, "90%")
    assert room.count(frame_room._WORDS) == 1


def at_depth(depth: int, call: Callable[[], int]) -> int:
    return call() if depth == 0 else at_depth(depth - 1, call)


def page_faults() -> int:
    """Page faults of a loop of calls."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(500):
        page_faults_of_none()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def page_faults_of_none() -> None:
    """A call that does nothing."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults as Linux does")
def test_at_no_depth_do_calls_fault_pages_where_there_is_room() -> None:
    bare = [at_depth(depth, page_faults) for depth in range(300)]
    called = with_room(lambda: page_faults())
    roomy = [at_depth(depth, called) for depth in range(300)]
    assert max(roomy[1:]) < 100, (max(bare), max(roomy))
