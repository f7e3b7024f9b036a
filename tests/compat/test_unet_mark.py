"""Long skips reach across the whole net, and the plan saves more memory than checkpointing each block.

Per-block checkpointing of the U-Net with BatchNorm needs 54.6 % of plain training's memory.
"""

from __future__ import annotations

import copy

import pytest
from harness import HOW
from training import train, train_plain
from vision_nets import GroupUNet

import hybridremat
from hybridremat.zoo import reference_model

SHARE, EXTRA_FLOPS = 0.50, 0.13


@pytest.mark.compat
@pytest.mark.parametrize("norm", ["BatchNorm", "GroupNorm"])
def test_unet_at_50_percent(norm, line):
    model, batch = reference_model("unet")
    model = model if norm == "BatchNorm" else GroupUNet()
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
    line("Vision", f"U-Net with {norm}, base 32, 128 px, at 50 %", "bit-equal to plain eager", remark=remark)
