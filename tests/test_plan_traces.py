"""A plan as PyTorch's memory snapshot and as a Perfetto trace, read by the formats' own readers."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest

import hybridremat
from hybridremat.graph.memory import step_memory
from support.html_pages import planned


@pytest.fixture(scope="module", params=[(3, 0.0), (12, 0.4)], ids=["least", "longer"])
def plan(request):
    return planned(*request.param)


@pytest.fixture
def snapshot(plan, tmp_path):
    plan.to_memory_viz(tmp_path / "plan.pickle")
    return pickle.loads((tmp_path / "plan.pickle").read_bytes())  # noqa: S301 (written above)


def changes(trace):
    signs = {"alloc": 1, "free_completed": -1}
    return [signs[event["action"]] * event["size"] for event in trace if event["action"] in signs]


def test_the_snapshot_peaks_where_the_plan_does(plan, snapshot):
    (trace,), (segment,) = snapshot["device_traces"], snapshot["segments"]
    assert max(accumulate(changes(trace))) == plan.predicted_peak
    left = [block["size"] for block in segment["blocks"] if block["state"] == "active_allocated"]
    assert sum(left) == sum(changes(trace)) == segment["allocated_size"]
    asked = [event["addr"] for event in trace if event["action"] == "free_requested"]
    assert asked == [event["addr"] for event in trace if event["action"] == "free_completed"]


def test_nothing_alive_overlaps(snapshot):
    """An oracle of its own: a set of live ranges, checked at every allocation."""
    live, (segment,) = {}, snapshot["segments"]
    for event in snapshot["device_traces"][0][1:]:
        start, stop = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert segment["address"] <= start and stop <= segment["address"] + segment["total_size"]
            assert not any(start < other and at < stop for at, other in live.items())
            live[start] = stop
        elif event["action"] == "free_completed":
            assert live.pop(start) == stop
    kept = {b["address"] for b in segment["blocks"] if b["state"] == "active_allocated"}
    assert live.keys() == kept


def test_frames_name_op_module_and_line(plan, snapshot):
    frames = [event["frames"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    graph = plan.details.graph
    made = {
        (f"{op.target} → {graph.values[value].name}", op.module or "(no module)", op.source)
        for op in graph.ops
        for value in op.writes
        if graph.values[value].bytes
    }
    found = {(own["name"], module["name"], f"{own['filename']}:{own['line']}") for own, module, _ in frames}
    assert made <= found
    assert any("recomputed" in role["name"] for *_, role in frames)


def test_pytorchs_own_readers_take_the_snapshot(snapshot, capsys):
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    for page in (viewer.trace_plot(snapshot), viewer.segment_plot(snapshot)):
        assert "snapshot.pickle" in page
    text = viewer.trace(snapshot)
    assert "cudaMalloc" in text and "del " in text
    total = snapshot["segments"][0]["total_size"]
    assert f"total_reserved: {viewer.Bytes(total)}" in viewer.segsum(snapshot)

    def folded(lines):
        return lines

    only = viewer.compare([], snapshot["segments"], format_flamegraph=folded)
    assert "only_after" in only and "aten." in only
    assert "aten." in viewer.memory(snapshot, format_flamegraph=folded)
    assert "stream_0" in viewer.segments(snapshot, format_flamegraph=folded)
    capsys.readouterr()


def test_the_trace_has_every_op_and_the_memory_at_it(plan, tmp_path):
    plan.to_trace(tmp_path / "plan.json")
    trace = json.loads((tmp_path / "plan.json").read_text())
    events, graph = trace["traceEvents"], plan.details.graph
    assert trace["otherData"]["predicted_peak_bytes"] == plan.predicted_peak
    ops = [event for event in events if event["ph"] == "X"]
    assert [event["args"]["op"] for event in ops] == [graph.ops[op].target for op in plan.schedule.steps]
    assert [event["tid"] for event in ops].count(1) == plan.schedule.num_forward
    again = len(plan.schedule.steps) - len(set(plan.schedule.steps))
    assert [event["cat"] for event in ops].count("recomputed") == again > 0
    assert all(event["ts"] + event["dur"] <= after["ts"] + 1e-6 for event, after in pairwise(ops))
    memory = [event for event in events if event["ph"] == "C"]
    totals = [event["args"]["bytes"] for event in memory if event["name"].startswith("step memory")]
    assert totals == list(step_memory(graph, plan.schedule).profile)
    kinds = [sum(event["args"].values()) for event in memory if event["name"].startswith("by kind")]
    assert kinds == totals


@pytest.mark.parametrize("method", ["to_memory_viz", "to_trace", "to_html", "save"])
def test_a_path_that_cannot_be_written_is_a_typed_error(plan, method, tmp_path):
    with pytest.raises(hybridremat.OutputError, match="missing"):
        getattr(plan, method)(tmp_path / "missing" / "file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("method", ["to_memory_viz", "to_trace"])
def test_a_step_of_several_graphs_is_refused(plan, method, tmp_path):
    several = replace(plan, parts=(plan, plan), details=None, schedule=replace(plan.schedule, steps=()))
    with pytest.raises(hybridremat.PlotError, match="several graphs"):
        getattr(several, method)(tmp_path / "file")
