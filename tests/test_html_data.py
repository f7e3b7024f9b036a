"""The file of a report: what it holds, against the plan; read as text, without a browser."""

import re
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.cli import main as cli
from hybridremat.graph.joint import plain_schedule
from hybridremat.graph.memory import MemorySimulator, step_memory
from hybridremat.planning.plan import Plan
from hybridremat.plans.policy import PinRecord
from hybridremat.plans.records import GraphBreak
from hybridremat.reports.html_data import figures, reruns
from hybridremat.reports.html_page import render_html
from hybridremat.reports.html_step import MOST_POINTS
from hybridremat.reports.timeline import step_timeline, thinned
from hybridremat.sequence.decisions import Backward, Forward, ForwardOption, Solo
from support.html_pages import data_of, named_graph, planned, unpacked


@pytest.fixture(scope="module", params=[(3, 0.4), (30, 0.1), (70, 0.5)], ids=["short", "long", "many blocks"])
def plan(request) -> Plan:
    return planned(*request.param)


@pytest.fixture(scope="module")
def graph(plan):
    (graph,) = data_of(render_html(plan))["graphs"]
    return graph


@pytest.mark.quick_cases(1)
def test_figures_are_the_plans(plan, graph):
    names = ("memory_limit", "predicted_peak", "plain_peak", "least_peak", "overhead", "extra_flops")
    assert {name: graph["figures"][name] for name in names} == {name: getattr(plan, name) for name in names}
    page = render_html(plan)
    lines = str(plan).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("limit "))
    for line in lines[first : first + 6]:
        name, text = re.split(r"  +", line, maxsplit=1)
        assert f"<dt>{name}</dt><dd>{text}</dd>" in page


@pytest.mark.parametrize("name", ["planned", "plain"])
def test_steps_are_those_that_the_replay_sees(plan, graph, name):
    joint = plan.details.graph
    schedule = plan.schedule if name == "planned" else plain_schedule(joint)
    memory = step_memory(joint, schedule)
    step = graph["steps"][name]
    assert (step["peak"], step["peakAt"]) == (memory.peak, memory.peak_at)
    assert step["peakAt"] in step["shown"]
    assert (step["executions"], step["forward"]) == (len(schedule.steps), schedule.num_forward)
    assert step["time"] == sum(joint.ops[op].time for op in schedule.steps)
    assert len(step["shown"]) <= MOST_POINTS
    assert step["total"] == [memory.profile[at] for at in step["shown"]]
    bands = [unpacked(band, len(step["shown"])) for band in step["bands"]]
    assert len(bands) == len(graph["bands"])
    each = graph["blocksPerBand"]
    whole = step_timeline(plan.details.chain, schedule).band_bytes(step["shown"]).tolist()
    assert bands[1] == [sum(column) for column in zip(*whole[each : 2 * each], strict=True)]
    assert [sum(column) for column in zip(*bands, strict=True)] == step["total"]
    modules = [graph["texts"][graph["ops"][op][1]] for op in step["op"]]
    assert modules == [joint.ops[schedule.steps[at]].module for at in step["shown"]]
    names = [graph["texts"][graph["ops"][op][0]] for op in step["op"]]
    over = MemorySimulator(joint).overwritten(schedule) if name == "planned" else {}
    assert [each.endswith(", in place") for each in names] == [at in over for at in step["shown"]]


@pytest.mark.parametrize("name", ["planned", "plain"])
def test_what_is_alive_adds_up(plan, graph, name):
    step = graph["steps"][name]
    assert step["complete"]
    sizes = [step["states"] if value < 0 else graph["values"][value][1] for value in step["value"]]
    spans = list(zip(step["birth"], step["death"], sizes, strict=True))
    for at, total, temporary in zip(step["shown"], step["total"], step["temporary"], strict=True):
        assert sum(size for birth, death, size in spans if birth <= at <= death) + temporary == total


def test_blocks_list_every_value_once(plan, graph):
    for block, rows in zip(plan.blocks, graph["blocks"], strict=True):
        read = [(graph["values"][value][0], bool(saved), times) for value, saved, times in rows]
        again = {record.name: times for record, times in block.recomputed}
        saved = {record.name for record in block.saved}
        names = [*saved, *again, *(record.name for record in block.freed)]
        assert Counter(read) == Counter((n, n in saved, again.get(n, 0)) for n in set(names))


def test_the_chain_and_the_frontier_are_the_plans(plan, graph):
    details = plan.details
    assert [block["saved"] for block in graph["chain"]["blocks"]] == [b.saved_bytes for b in plan.blocks]
    sizes = [sum(details.graph.values[v].bytes for v in values) for values in details.chain.boundary]
    assert graph["chain"]["boundary"] == sizes
    front = graph["frontier"]
    assert front["points"] == [[p.peak, p.overhead, p.extra_flops] for p in details.frontier]
    assert front["chosen"] in front["points"]
    assert front["checkpointed"][0] == details.checkpointed.peak


def test_forwards_that_run_again():
    decisions = [Forward(0), ForwardOption(1, 0), Forward(2), Solo(3, 1), Forward(0), Forward(1), Solo(2, 0)]
    decisions += [Backward(1, 0), ForwardOption(0, 2), Backward(0, 2)]
    expected = [{"before": 2, "first": 0, "last": 1}, {"before": 0, "first": 0, "last": 0}]
    assert reruns(decisions) == expected
    assert reruns(()) == []


SIZES = st.lists(st.integers(0, 50), max_size=60) | st.permutations(range(30))


@given(SIZES, st.integers(0, 60), st.integers(2, 12))
def test_thinning_covers_all_and_keeps_the_highest(totals, num_forward, most):
    num_forward = min(num_forward, len(totals))
    stretches = thinned(totals, num_forward, most)
    covered = [at for s in stretches for at in range(s.first, s.last + 1)]
    assert covered == list(range(len(totals)))
    assert len(stretches) <= most
    assert all(totals[s.shown] == max(totals[s.first : s.last + 1]) for s in stretches)
    assert all(s.first <= s.shown <= s.last for s in stretches)
    assert not any(s.first < num_forward <= s.last for s in stretches)
    if totals:
        assert totals.index(max(totals)) in {s.shown for s in stretches}


def test_a_file_needs_nothing_else_and_is_small():
    page = render_html(planned(96, 0.3))
    assert len(page.encode()) < 2_000_000
    loads = r"(src|href)=\"(?!data:,)|url\((?!#)|@import|fetch\(|XMLHttp|import\("
    assert not re.search(loads, page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_names_are_text_and_never_markup():
    plan = planned(2, 0.5)
    evil = "</script><img src=x onerror=alert(1)>&"
    origin = replace(plan.origin, model=evil)
    blocks = tuple(replace(block, modules=(evil,)) for block in plan.blocks)
    graph = plan.details.graph
    values = tuple(replace(value, name=evil) for value in graph.values)
    details = replace(plan.details, chain=replace(plan.details.chain, graph=replace(graph, values=values)))
    page = render_html(replace(plan, origin=origin, blocks=blocks, details=details))
    assert "<img" not in page
    assert "&lt;img src=x" in page
    assert evil in {row[0] for row in data_of(page)["graphs"][0]["values"]}


def test_a_step_of_several_graphs_shows_each():
    parts = (planned(2, 0.5), planned(3, 0.5))
    breaks = (GraphBreak("/a/model.py:7", "a print", 4096),)
    whole = replace(parts[0], parts=parts, breaks=breaks, details=None)
    page = render_html(whole)
    assert "Graph 2 of 2" in page
    assert "a print" in page
    assert "4.00 KiB" in page
    peaks = [graph["steps"]["planned"]["peak"] for graph in data_of(page)["graphs"]]
    assert peaks == [part.predicted_peak for part in parts]


def test_pins_are_listed():
    plan = planned(2, 0.5)
    assert "<h2>Policy</h2>" not in render_html(plan)
    page = render_html(replace(plan, pins=(PinRecord("h.*:gelu", "must_save", 3, 4096),)))
    assert "<td>h.*:gelu</td><td>must_save</td>" in page
    assert re.search(r"<td class=\"number\">3</td>\s*<td class=\"number\">4.00 KiB</td>", page)


def test_a_plan_without_details_keeps_its_table():
    plan = replace(planned(2, 0.5), details=None)
    page = render_html(plan)
    assert data_of(page)["graphs"][0]["steps"] is None
    assert "There are no details of this plan" in page
    assert "aten" not in page.split("<table")[1].split("</table>")[0]
    assert "attention" in page


def test_files_are_written_whole_and_from_the_command_line(tmp_path, capsys):
    plan = planned(2, 0.5)
    plan.to_html(tmp_path / "a.html")
    plan.save(tmp_path / "p.json")
    assert cli.main(["inspect", str(tmp_path / "p.json"), "--html", str(tmp_path / "b.html")]) == 0
    assert capsys.readouterr().out == f"{plan}\n"
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "b.html", "p.json"]
    assert cli.main(["inspect", str(tmp_path / "p.json"), "--html", str(tmp_path / "no" / "b.html")]) == 2
    assert "no" in capsys.readouterr().err


def test_no_figure_is_missing():
    plan = planned(2, 0.5)
    assert set(figures(plan)) <= {*vars(plan), *vars(plan.request)}
    assert named_graph(2) == plan.details.graph
