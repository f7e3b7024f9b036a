"""How much is looked at for one plan: counts that no machine changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.planning.option_cache import OptionCache
from hybridremat.planning.planner import plan_graph
from hybridremat.runtime import prepare
from hybridremat.sequence import frontier
from hybridremat.sequence.exchange.improve import search_ranges
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import PhasePeaks
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.strategies.hybrid import HYBRID
from support.nets import transformer
from support.training import small
from support.wrapping import wrap


def uneven(layers):
    """Layers that take different times, so that many sets of recomputations are worth it at some limit."""
    graph = transformer(layers)
    ops = (replace(op, time=op.time + 7 * op.id % 31) for op in graph.ops)
    return replace(graph, ops=tuple(ops))


def test_a_plan_for_one_limit_looks_at_few_schedules_and_is_the_same(monkeypatch):
    """Near the limit and near the least; the whole frontier is for whoever asks for it."""
    graph, options, looked, judged = uneven(10), OptionCache(), [], Judge.__call__

    def counted(judge, *args):
        looked.append(args)
        return judged(judge, *args)

    monkeypatch.setattr(Judge, "__call__", counted)

    def planned(limit, **how):
        looked.clear()
        found = plan_graph(graph, cache=options, workers=1, **how)
        chosen = found.choose(limit, None)
        return (chosen.peak, chosen.time, found.least()), len(looked)

    plain = step_memory(graph, plain_schedule(graph)).peak
    for share in (90, 80):
        limit = share * plain // 100
        everywhere, all_ = planned(limit)
        near, few = planned(limit, ranges=search_ranges(limit, plain))
        assert near == everywhere and few < 0.65 * all_


@pytest.mark.slow
def test_how_many_tables_of_a_chain_are_filled(monkeypatch):
    """Fewer options need no table of the finest slots, and none at all far from the least memory.

    A frontier has all, to be nowhere above theirs. Many rows have the finest slots near the least alone.
    """
    fill, filled = frontier.chain_table, []

    def counted(*args, slots=None, **how):
        filled.append(slots)
        return fill(*args, slots=slots, **how)

    monkeypatch.setattr(frontier, "chain_table", counted)
    graph, options = uneven(10), OptionCache()

    def tables(ranges):
        filled.clear()
        found = plan_graph(graph, cache=options, workers=1, ranges=ranges)
        finest = sum(slots is None for slots in filled)
        return finest / len(found.chains), (len(filled) - finest) / len(found.chains), found

    *everywhere, found = tables(None)
    least = found.least().peak
    near, far = int(1.2 * least), int(1.5 * least)
    assert everywhere == [2, 2]
    assert tables([(near, near)])[:2] == (1, 2) and tables([(far, far)])[:2] == (1, 1)
    monkeypatch.setattr(frontier, "MANY_ROWS", 0)
    assert tables(None)[:2] == (2, 2)
    assert tables([(near, near)])[:2] == (1, 2) and tables([(far, far)])[:2] == (0, 1)


def test_rivals_run_near_the_least_memory_and_everywhere_where_several_forwards_wait():
    point = SchedulePoint(PhasePeaks(100, 100, 0), 1, 0, plain_schedule(uneven(1)), 100)
    own = Pool.of([point])

    def rivals(strategy, limit):
        wanted = frontier.Wanted(ranges=[(limit, limit + 5), (limit + 50, limit + 50)])
        return strategy._rivals_for(wanted, own)

    assert rivals(HYBRID, 130) == HYBRID.rivals and rivals(HYBRID, 131) == ()
    several = HYBRID.for_saved()
    assert rivals(several, 131) == rivals(several, 100) == (*HYBRID.rivals, *HYBRID.waiting)
    assert HYBRID._rivals_for(frontier.EVERYTHING, own) == HYBRID.rivals


def test_a_process_alone_writes_no_digest_of_its_plan(monkeypatch):
    """It is for other ranks, and takes the longer the more ops a step has."""
    monkeypatch.setattr(prepare, "plan_digest", lambda _: 1 / 0)
    wrap(*small("mlp"), "90%")
