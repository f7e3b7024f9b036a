"""Ctrl-C while a model is wrapped: it stays as it was, and can be wrapped and trained afterwards."""

from __future__ import annotations

import pytest

from hybridremat.planning import pipeline, planner, stages, step_costs
from hybridremat.sequence.exchange.search import Exchange
from support.training import small, train, train_plain
from support.wrapping import assert_untouched, state_of, wrap

PLACES = [
    (pipeline, "trace_joint"),
    (step_costs, "with_costs"),
    (planner, "segment_graph"),
    (stages, "bind_blocks"),
    (planner, "solve_options"),
    (planner, "compose"),
    (Exchange, "__call__"),
    (planner, "choose_from"),
    (pipeline, "emit"),
    (pipeline, "check"),
]


QUICK = ("solve_options", "__call__", "check")
CASES = [
    pytest.param(owner, name, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for owner, name in PLACES
]


@pytest.mark.parametrize("owner, name", CASES)
def test_a_model_whose_planning_is_interrupted_is_untouched(owner, name, monkeypatch) -> None:
    model, batch = small("running")
    before, seen = state_of(model), []

    def interrupted(*_, **__):
        seen.append(name)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            wrap(model, batch, "85%")
    assert seen
    assert_untouched(before, model)
    wrap(model, batch, "100%")
    assert not train(model, batch, steps=2).differences(train_plain(*small("running"), steps=2))
