"""Moves in reports: traces, charts and explanations say what the replay of the plan counts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from matplotlib.figure import Figure

import hybridremat
from hybridremat.plans.judging import plan_judge, timed_moves
from hybridremat.reports import memory_plot
from hybridremat.reports.html_data import report_data
from hybridremat.reports.trace_file import FROM_HOST, TO_HOST, trace
from hybridremat.reports.whole_step import whole_step
from hybridremat.sequence.offload.link import Link
from support.sized_steps import tokens
from support.training import Transformer
from support.wrapping import HOW

FAST, SLOW = Link(1e15, 1e15, latency=0), Link(2e8, 1e8, latency=200)
"""By which all moves, and by which the step waits."""


@pytest.fixture(scope="module", params=["", "blocks.*"], ids=["one graph", "units"])
def plan(request, tmp_path_factory):
    torch.manual_seed(0)
    units = {"units": request.param} if request.param else {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridremat.planning.moving.NOMINAL", FAST)
        away = f"file:{tmp_path_factory.mktemp('away')}"
        model, batch = Transformer(1, 16), tokens(4, 40)
        plan = hybridremat.plan(model, kwargs=batch, memory_limit="65%", offload=away, **HOW, **units)
    return slower(replace(plan, parts=tuple(map(slower, plan.parts))))


def slower(plan):
    """As if it had been made for a slow link."""
    return plan if plan.details is None else replace(plan, details=replace(plan.details, link=SLOW))


def graphs(plan):
    return [plan.parts[number] for number in plan.places] or [plan]


def events(plan, name):
    return [each for each in trace(plan)["traceEvents"] if name(each)]


def test_a_trace_takes_as_long_as_the_plan(plan):
    took = [timed_moves(each, each.details) for each in graphs(plan)]
    assert sum(each.waits_out + each.waits_back for each in took) > 0
    waits = events(plan, lambda each: each.get("cat") == "wait")
    lasts = sum(each["dur"] for each in waits) * 1000
    assert lasts == pytest.approx(sum(each.waits_out + each.waits_back for each in took))
    if not plan.parts:  # what runs beside graphs has a time that is drawn alone
        ends = [each["ts"] + each["dur"] for each in events(plan, lambda each: each.get("tid") in (1, 2))
                if "dur" in each]
        assert max(ends) * 1000 == pytest.approx(took[0].total)


def test_copies_are_drawn_as_they_run(plan):
    """One after the other each way; out before the memory is another's, back before the first reader."""
    step = whole_step(plan)
    copies, starts, places = list(step.copies()), step.starts(), step.places()
    moves = [(section, each.move) for section, timeline in enumerate(step.timelines) if timeline is not None
             for each in timeline.moves.values]
    assert len(copies) == 2 * len(moves) == 2 * sum(len(each.schedule.moves) for each in graphs(plan)) > 0
    for way in (True, False):
        ways = sorted((each.start, each.start + each.time) for each in copies if each.to_host == way)
        assert all(one[1] <= other[0] for one, other in pairwise(ways))
        drawn = events(plan, lambda each, way=way: each.get("tid") == (TO_HOST if way else FROM_HOST)
                       and "dur" in each)
        assert sorted(each["ts"] * 1000 for each in drawn) == pytest.approx([start for start, _ in ways])
    for (section, move), out, back in zip(moves, copies[::2], copies[1::2], strict=True):
        made = places[section, move.birth]
        assert out.start >= starts[made] + step.times()[made]
        split = graphs_split(step, section)
        after = places[section, move.free] if move.free < split else places[section, split - 1] + 1
        assert out.start + out.time <= starts[after]  # also of another graph
        assert back.start >= starts[places[section, move.fetch]] - step.waits[places[section, move.fetch]]
        assert back.start + back.time <= starts[places[section, move.ready]]


def test_the_picture_has_each_copy(plan, tmp_path, monkeypatch):
    figure = Figure()
    monkeypatch.setattr(memory_plot, "new_figure", lambda: figure)
    plan.plot(tmp_path / "memory.png")
    copies = list(whole_step(plan).copies())
    memory, link = figure.axes
    assert [each.get_text() for each in link.get_yticklabels()] == ["to host", "back"]
    for bars, to_host in zip(link.collections, (True, False), strict=True):
        drawn = {(path.vertices[:, 0].min(), path.vertices[:, 0].max()) for path in bars.get_paths()}
        assert drawn == {(each.start, each.start + each.time) for each in copies if each.to_host == to_host}
    assert memory.get_xlim() == link.get_xlim()


def graphs_split(step, section):
    return step.timelines[section].schedule.num_forward


def test_host_memory_is_drawn_beside_the_device(plan):
    sizes = [each.details.graph.values[move.value].bytes for each in graphs(plan)
             for move in each.schedule.moves]
    step, data = whole_step(plan), report_data(plan)
    assert max(step.host_bytes()) == sum(sizes) <= plan.host_bytes
    assert step.host_bytes()[0] == step.host_bytes()[-1] == 0
    counted = [each["args"]["bytes"] for each in events(plan, lambda each: each["name"].startswith("host"))]
    assert max(counted) == sum(sizes)
    shown = data["whole"] or data["graphs"][0]
    assert max(shown["steps"]["planned"]["host"][1::2]) == sum(sizes)
    assert shown["steps"]["plain"]["host"] == []


def test_it_is_said_why_a_value_moves(plan):
    block = next(each for each in plan.blocks if each.moved)
    said = [each for each in plan.inspect(block.index).values if each.policy == "MOVE"]
    part = next(each for each in graphs(plan) if any(block.moved == own.moved for own in each.blocks))
    judge, schedule = plan_judge(part, part.details), part.schedule
    assert said
    for each in said:
        stays = replace(schedule, moves=tuple(m for m in schedule.moves if m.value != each.value.id))
        assert each.if_saved.needed == judge.needs(stays)
        assert each.if_saved.more_time == judge.time(stays) - judge.time(schedule) <= 0
    assert any(each.if_again is not None for each in said)
    text = str(plan.inspect(block.index))
    assert "if made" in text and "MOVE" in text
    assert "moved" in str(plan.explain(said[0].value.module))
