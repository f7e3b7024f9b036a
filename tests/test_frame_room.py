"""Room for frames: what planning runs in."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from hybridremat.compiler import frame_room
from hybridremat.compiler.frame_room import with_room
from hybridremat.planning import pipeline
from support.training import small
from support.wrapping import wrap


def test_a_call_in_a_room_of_its_own_returns_and_raises_as_it_is() -> None:
    found = object()
    assert with_room(lambda: found) is found
    with pytest.raises(ZeroDivisionError):
        with_room(lambda: 1 // 0)


def test_steps_are_captured_and_planned_with_room(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_graph, room = pipeline.plan_graph, []

    def watched(*args, **how):
        frame = sys._getframe()
        while frame is not None:
            room.append(frame.f_code.co_stacksize)
            frame = frame.f_back
        return plan_graph(*args, **how)

    monkeypatch.setattr(pipeline, "plan_graph", watched)
    model, batch = small("mlp")
    wrap(model, batch, "90%")
    assert room.count(frame_room._WORDS) == 2  # for Dynamo, and for what it calls


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
    roomy = [at_depth(depth, lambda: with_room(page_faults)) for depth in range(300)]
    assert max(roomy[1:]) < 100, (max(bare), max(roomy))
