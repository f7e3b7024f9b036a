"""Pictures of plans: what they draw is what the plan says."""

from __future__ import annotations

import pytest
from matplotlib.figure import Figure

from hybridremat import PlotError
from hybridremat.analysis.pipelines import gantt
from hybridremat.analysis.pipelines.plan import PipelinePlan
from hybridremat.reports import memory_plot
from hybridremat.reports.plain_step import plain_plan
from hybridremat.reports.whole_step import whole_step
from hybridremat.sequence.pipeline.replay import Span
from hybridremat.units import parse_bytes
from support.html_pages import joined, planned


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are made."""
    made: list[Figure] = []

    def new_figure() -> Figure:
        made.append(Figure())
        return made[-1]

    for module in (memory_plot, gantt):
        monkeypatch.setattr(module, "new_figure", new_figure)
    return made


PLANS = {"one graph": lambda: planned(8, 0.15), "several": lambda: joined(planned(4, 0.3), planned(3, 0.3))}


@pytest.mark.parametrize("name", PLANS)
def test_the_memory_before_and_after(name, figures, tmp_path):
    plan = PLANS[name]()
    plan.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    unit = parse_bytes("1 " + axes.get_ylabel().rpartition(" ")[2])
    plain, _, after, _ = (patch.get_data() for patch in axes.patches)
    for drawn, step in ((plain, whole_step(plain_plan(plan))), (after, whole_step(plan))):
        assert [round(size * unit) for size in drawn.values] == list(step.totals())
        assert list(drawn.edges[:-1]) == list(step.starts())
    if not plan.parts:
        assert round(max(plain.values) * unit) == plan.plain_peak
        assert round(max(after.values) * unit) == plan.predicted_peak
        assert after.edges[-1] / plain.edges[-1] - 1 == pytest.approx(plan.overhead, abs=1e-6)
    (limit,) = axes.lines
    assert round(limit.get_ydata()[0] * unit) == plan.memory_limit


def test_a_pipeline_as_a_gantt_chart(figures, tmp_path):
    spans = (
        Span(0, 0, 10, 0, 0, "forward"),
        Span(1, 10, 40, 1, 0, "forward"),
        Span(1, 40, 90, 1, 0, "backward"),
        Span(0, 90, 110, 0, 0, "backward"),
        Span(0, 110, 111, 0, 1, "backward"),
    )
    plan = PipelinePlan(
        schedule="1f1b", devices=2, stages_per_device=1, microbatches=1, stages=(), step_time=111, bubble=0.5,
        timeline=spans, _wrap={}, _last={},
    )  # fmt: skip
    plan.plot(tmp_path / "pipeline.svg")
    (axes,) = figures[0].axes
    bars = {(bar.get_x(), bar.get_width(), bar.get_y() + 0.4) for bar in axes.patches}
    assert bars == {(each.start, each.end - each.start, each.device) for each in spans}
    assert [text.get_text() for text in axes.texts] == ["0"] * 4  # the last is too short for its number
    assert [label.get_text() for label in axes.get_yticklabels()] == ["device 0", "device 1"]


def test_other_files_are_refused(tmp_path):
    with pytest.raises(PlotError, match="suffix"):
        planned(3, 0.4).plot(tmp_path / "memory.txt")
    assert not list(tmp_path.iterdir())
