"""The timeline of a step of several graphs: its highest point is the plan's peak, all runs in order."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import accumulate, groupby, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hybridremat
from hybridremat import Plan
from hybridremat.graph.memory import inputs_in_backward, step_memory
from hybridremat.plans.records import StepComposition, StepSection
from hybridremat.reports.html_data import report_data
from hybridremat.reports.plain_step import plain_plan
from hybridremat.reports.whole_step import BETWEEN, section_names, whole_step
from hybridremat.sequence.joined_graphs import Beside, MultiGraphStep, PartPoint, StepPart
from support.broken_nets import HOW as BREAKS
from support.broken_nets import Inside, Reader, batch
from support.examples import examples
from support.html_pages import planned, unpacked
from support.towers import NormedTower, tower_batch
from support.wrapping import HOW


def of_units(*wide: int, again: bool = False, **how: object) -> Plan:
    torch.manual_seed(0)
    given = tower_batch()
    asked = {"memory_limit": "62%", **how}
    return hybridremat.plan(NormedTower(*wide, again=again), kwargs=given, units="layers.*", **HOW, **asked)


def of_breaks(model: nn.Module, limit: str, **how: object) -> Plan:
    given = batch() if isinstance(model, Reader) else {"x": batch()["x"]}
    return hybridremat.plan(model, kwargs=given, memory_limit=limit, **BREAKS, **how)


MADE = {
    "alike": lambda: of_units(*[64] * 6),
    "two kinds": lambda: of_units(64, 96, 64, 96),
    "twice": lambda: of_units(64, 96, again=True, memory_limit="80%"),
    "early gradients": lambda: of_units(64, 96, 64, gradients="in_backward", memory_limit="80%"),
    "two forwards": lambda: of_units(64, 64, forwards=2, memory_limit="150%"),
    "a reserve": lambda: of_units(64, 64, reserve=20_000, memory_limit="90%"),
    "breaks": lambda: of_breaks(Reader(), "90%"),
    "held outputs": lambda: of_breaks(Reader(), "120%", hold_outputs=True),
    "inside": lambda: of_breaks(Inside(), "100%"),
}


@pytest.fixture(scope="module", params=MADE, ids=str)
def plan(request: pytest.FixtureRequest) -> Plan:
    torch.manual_seed(0)
    made: Plan = MADE[request.param]()
    assert len(made.places) > 1
    return made


def test_its_highest_point_is_the_plans_peak(plan: Plan) -> None:
    step = whole_step(plan)
    assert max(step.totals()) == plan.predicted_peak
    assert max(whole_step(plain_plan(plan)).totals()) == plan.plain_peak
    by_name = step.bytes_by(lambda section, _: step.name(section))
    assert tuple(map(sum, zip(*by_name.values(), strict=True))) == step.totals()
    assert min(map(min, by_name.values())) >= 0


def test_forwards_run_in_order_and_backwards_in_reverse_each_once(plan: Plan) -> None:
    step = whole_step(plan)
    runs = [run for run, _ in groupby((each.section, each.forward) for each in step.executions)]
    sections = range(len(step.names))
    assert runs == [*((n, True) for n in sections), *((n, False) for n in reversed(sections))]
    graphs = [n for n in sections if step.names[n] != BETWEEN]
    assert len({step.names[n] for n in graphs}) == len(graphs) == len(plan.places)
    for section, place in zip(graphs, plan.places, strict=True):
        ran = [each.local for each in step.executions if each.section == section and each.local is not None]
        assert ran == list(range(len(plan.parts[place].schedule.steps)))


def test_the_snapshot_and_the_trace_peak_where_the_plan_does(plan: Plan, tmp_path) -> None:
    plan.to_memory_viz(tmp_path / "plan.pickle")
    snapshot = pickle.loads((tmp_path / "plan.pickle").read_bytes())  # noqa: S301 (written above)
    (events,), signs = snapshot["device_traces"], {"alloc": 1, "free_completed": -1}
    changes = [signs[event["action"]] * event["size"] for event in events if event["action"] in signs]
    assert max(accumulate(changes)) == plan.predicted_peak
    assert sum(changes) == snapshot["segments"][0]["allocated_size"]
    plan.to_trace(tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())["traceEvents"]
    counters = [event for event in found if event["ph"] == "C"]
    assert max(e["args"]["bytes"] for e in counters if e["name"].startswith("step")) == plan.predicted_peak
    for name in ("by kind", "by graph"):
        assert (
            max(sum(e["args"].values()) for e in counters if e["name"].startswith(name))
            == plan.predicted_peak
        )
    ops = [event for event in found if event["ph"] == "X" and event["tid"] < 3]
    assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in pairwise(ops))
    shown = [event["name"] for event in found if event["ph"] == "X" and event["tid"] == 3]
    names = list(section_names(plan.composition))
    assert shown == [*names, *reversed(names)]


def test_the_report_draws_it(plan: Plan) -> None:
    whole = report_data(plan)["whole"]
    peaks = [whole["steps"][name]["peak"] for name in ("planned", "plain")]
    assert peaks == [plan.predicted_peak, plan.plain_peak]
    for step in whole["steps"].values():
        bands = [unpacked(band, len(step["shown"])) for band in step["bands"]]
        assert len(bands) == len(whole["bands"])
        assert [sum(column) for column in zip(*bands, strict=True)] == step["total"]
        sizes = [whole["values"][value][1] for value in step["value"]]
        spans = list(zip(step["birth"], step["death"], sizes, strict=True))
        for at, total, own in zip(step["shown"], step["total"], step["temporary"], strict=True):
            assert sum(size for birth, death, size in spans if birth <= at <= death) + own == total


def test_a_loaded_plan_has_the_same_timeline(plan: Plan, tmp_path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert whole_step(loaded).totals() == whole_step(plan).totals()


def test_modules_and_graphs_are_named() -> None:
    def section(part: int | None, unit: str = "") -> StepSection:
        return StepSection(part, unit, 0, 0, 0, 0, 0)

    sections = (section(None), section(0, "a"), section(1, "b"), section(0, "b"), section(2))
    named = "a", "b, graph 2 of 4", "b, graph 3 of 4", "graph 4 of 4"
    assert section_names(StepComposition(sections, 0, 0)) == (BETWEEN, *named)


PARTS = [planned(2, 0.5), planned(3, 0.3)]
small = st.integers(0, 300_000)


@st.composite
def compositions(draw: st.DrawFn) -> StepComposition:
    """Some graphs in some order, and code between them that may free what they have left."""
    sections: list[StepSection] = []
    for number in draw(st.lists(st.sampled_from((None, 0, 1)), min_size=1, max_size=6)):
        if number is None:
            freed = draw(st.sampled_from((0, 0, min(50_000, sum(each.saved for each in sections)))))
            saved = -freed or draw(small)
            figures = max(0, saved) + draw(small), draw(small), saved
            code = StepSection(None, "", *figures, draw(small), -freed)
            sections.append(replace(code, beside_forward=draw(small), beside_backward=draw(small)))
            continue
        details = PARTS[number].details
        split = PARTS[number].schedule.num_forward
        memory = step_memory(details.graph, PARTS[number].schedule)
        gradients = frozenset(draw(st.sets(st.sampled_from(sorted(details.graph.gradients)))))
        left = sum(v.bytes for v in details.graph.values if v.id in details.graph.gradients - gradients)
        inputs = frozenset(v.id for v in details.graph.values if v.producer is None and draw(st.booleans()))
        kept = inputs_in_backward(details.graph, PARTS[number].schedule, inputs)
        backward, saved = max(memory.profile[split:]) + kept, memory.saved + memory.released + kept
        beside = draw(small), draw(small)
        figures = max(memory.profile[:split]), backward, saved, left + draw(small)
        sections.append(StepSection(number, "", *figures, 0, gradients, 0, *beside, inputs))
    return StepComposition(tuple(sections), draw(small), 0)


@given(compositions())
@examples(50, deadline=None)
def test_any_composition_peaks_as_the_sum_of_its_graphs_says(composition: StepComposition) -> None:
    parts = tuple(
        StepPart((PartPoint(each.forward_peak, each.backward_peak, each.saved, 0),), each.left, each.dropped)
        for each in composition.sections
    )
    step = MultiGraphStep(
        parts,
        tuple(range(len(parts))),
        composition.joined_bytes,
        others=tuple(Beside(each.beside_forward, each.beside_backward) for each in composition.sections),
    )
    whole = replace(PARTS[0], parts=tuple(PARTS), composition=composition, details=None)
    assert max(whole_step(whole).totals()) == step.peak((0,) * len(parts))
    assert all(held.size >= 0 for held in whole_step(whole).holdings)


def test_what_cannot_be_drawn_says_why() -> None:
    whole = replace(PARTS[0], parts=tuple(PARTS), details=None)
    with pytest.raises(hybridremat.PlotError, match="version that did not keep"):
        whole_step(whole)
    compiled = replace(whole, request=replace(whole.request, compiler="inductor"))
    with pytest.raises(hybridremat.PlotError, match="compiled graphs"):
        whole_step(compiled)
    with pytest.raises(hybridremat.PlotError, match="no backward"):
        whole_step(replace(PARTS[0], details=None))
