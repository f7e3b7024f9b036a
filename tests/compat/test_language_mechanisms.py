"""What the everyday suite keeps of the language models, and what is not one graph."""

from __future__ import annotations

import copy

import pytest
import torch

import hybridremat
from support.compat import cases_language
from support.compat.cases_decoders import decoder
from support.compat.cases_encoders import TRANSLATED, TWO_STACKS, answer_batch, built
from support.compat.harness import HOW, Case, hold_to_plain
from support.quick_planning import quick_planning

BY_NAME = {case.name: case for case in cases_language.CASES}
# Padding beside dropout; routing; a scan in a loop; an encoder whose output every decoder layer reads.
EVERYDAY = [
    BY_NAME["GPT-2, sdpa, padded batch"],
    BY_NAME["Mixtral, grouped experts"],
    BY_NAME["Mamba, slow path"],
    Case(
        "Encoder–decoders",
        "BART of 1+2 layers",
        built("Bart", TRANSLATED, answer_batch, **{**TWO_STACKS, "encoder_layers": 1}),
        needs=("transformers",),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", EVERYDAY, ids=lambda case: case.name)
def test_planned_with_little_effort(case):
    with quick_planning():  # also where the table is made: these lines are not in it
        hold_to_plain(case, steps=2)


REFUSED = {
    "OPT, layerdrop 0.2": (
        decoder("OPT", ffn_dim=64, word_embed_proj_dim=32, layerdrop=0.2),
        "a branch on a random number: set `layerdrop=0`",
    ),
    'Mixtral, `experts_implementation="eager"`': (
        decoder("Mixtral", num_local_experts=4, num_key_value_heads=2, experts_implementation="eager"),
        'shapes that depend on the routing: leave the default ("grouped_mm"), or set "batched_mm"',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_shapes_and_branches_that_depend_on_values_are_refused(name):
    pytest.importorskip("transformers")
    model, batch = REFUSED[name][0]()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hybridremat.CaptureError, match=r"modeling_\w+\.py"):
        hybridremat.wrap(model.train(), kwargs=batch, memory_limit="60%", graph_breaks="error", **HOW)
    assert all(tensor.equal(before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", REFUSED)
def test_shapes_and_branches_that_depend_on_values_train_in_several_graphs(name, line):
    pytest.importorskip("transformers")
    build, remark = REFUSED[name]
    model, batch = build()
    model.config.use_cache = False  # which planned steps leave off
    plain = copy.deepcopy(model.train())
    with pytest.warns(hybridremat.GraphBreakWarning):
        hybridremat.wrap(model, kwargs=batch, memory_limit="100%", **HOW)
    for each in (plain, model):
        torch.manual_seed(1)
        each(**batch).loss.backward()
    for expected, made in zip(plain.parameters(), model.parameters(), strict=True):
        assert (made.grad is None) == (expected.grad is None)
        if expected.grad is not None:  # sums of grouped heads are added up in AOTAutograd's layout
            torch.testing.assert_close(made.grad, expected.grad, rtol=1e-5, atol=1e-7)
    line("Decoders", name, "trains in several graphs; as one a CaptureError", remark=remark)
