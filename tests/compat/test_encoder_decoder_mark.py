"""The encoder's output is read by every decoder layer, and the plan still saves memory."""

from __future__ import annotations

import copy

import pytest
from harness import HOW
from training import train, train_plain

import hybridremat
from hybridremat.zoo import reference_model

SHARE, EXTRA_FLOPS = 0.40, 0.11


@pytest.mark.compat
def test_t5_of_four_and_four_layers_at_40_percent(line):
    pytest.importorskip("transformers")
    model, batch = reference_model("t5")
    plain = train_plain(model, batch, steps=2)
    limit = int(SHARE * max(plain.peaks))
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=limit, **HOW)
    trained = train(planned, batch, steps=2)
    extra = hybridremat.get_plan(planned).extra_flops
    assert plain.differences(trained) == []
    assert max(trained.peaks) <= limit
    assert extra <= EXTRA_FLOPS
    remark = (
        f"{100 * max(trained.peaks) / max(plain.peaks):.1f} % of plain eager, extra flops {100 * extra:.1f} %"
    )
    line("Encoder–decoders", "T5 4+4 layers at 40 %", "bit-equal to plain eager", remark=remark)
