"""Steps that are not one graph, held to plain training: between graph breaks, and by units."""

from __future__ import annotations

import pytest

import hybridremat
from support.compat.cases_several import CASES, gan, penalty
from support.compat.harness import HOW, hold_to_plain, parameters
from support.compat.several_nets import TwoLosses

LONGER = {"HuBERT-CTC; units `hubert.feature_extractor`, `hubert.encoder.layers.*`"}


@pytest.mark.parametrize("case", parameters(CASES, LONGER))
def test_several_graphs(case, line):
    figures = hold_to_plain(case)
    above = max(
        figures[share]["predicted"] / figures[share]["measured"] - 1 for share in ("half-way", "least")
    )
    remark = f"{case.remark}; " if case.remark else ""
    remark += (
        f"predicted up to {100 * above:.1f} % above measured, planned in {figures['planning_seconds']:.1f} s"
    )
    line(case.group, case.name, figures.pop("outcome"), remark=remark, **figures)


def test_one_graph_for_two_backwards_says_what_helps():
    model, batch = gan()
    wrapped = hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)
    with pytest.raises(
        hybridremat.DoubleBackwardError, match=r"\(first \+ second\)\.backward\(\).*wrap_each"
    ):
        TwoLosses(*wrapped(**batch)).backward()


@pytest.mark.everyday
def test_a_loss_that_differentiates_names_its_line_and_what_could_be_planned():
    model, batch = penalty()
    with pytest.raises(
        hybridremat.CaptureError, match=r"torch\.autograd\.grad.*wrap_each\(model, \['generator'"
    ):
        hybridremat.wrap(model, kwargs=batch, memory_limit="100%", graph_breaks="plan", **HOW)
