"""Values that are read across the whole chain, and plans that still save memory.

An encoder's output is read by every decoder layer; a U-Net's skips reach from its first block to its last.
Checkpointing each block of the U-Net with BatchNorm needs 54.6 % of plain training's memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import hybridremat
from hybridremat.zoo.models import reference_model
from support.compat.harness import EQUAL, HOW
from support.compat.vision_nets import GroupUNet
from support.training import train, train_plain


@dataclass(frozen=True)
class Mark:
    """A model that must fit ``share`` of plain training's memory for at most ``extra_flops``."""

    group: str
    name: str
    build: Callable[[], tuple[Any, dict[str, Any]]]
    share: float
    extra_flops: float


def group_unet() -> tuple[Any, dict[str, Any]]:
    """The reference U-Net with GroupNorm, and the batch of the one with BatchNorm."""
    _, batch = reference_model("unet")
    return GroupUNet(), batch


UNET = "U-Net with {}, base 32, 128 px, at 50 %"
MARKS = [
    Mark("Encoder–decoders", "T5 4+4 layers at 40 %", partial(reference_model, "t5"), 0.40, 0.11),
    Mark("Vision", UNET.format("BatchNorm"), partial(reference_model, "unet"), 0.50, 0.13),
    Mark("Vision", UNET.format("GroupNorm"), group_unet, 0.50, 0.13),
]


@pytest.mark.compat
@pytest.mark.parametrize("mark", MARKS, ids=lambda mark: mark.name)
def test_mark(mark, line):
    pytest.importorskip("transformers")
    model, batch = mark.build()
    plain = train_plain(model, batch, steps=2)
    limit = int(mark.share * max(plain.peaks))
    planned = hybridremat.wrap(copy.deepcopy(model), kwargs=batch, memory_limit=limit, **HOW)
    trained = train(planned, batch, steps=2)
    extra = hybridremat.get_plan(planned).extra_flops
    assert plain.differences(trained) == []
    assert max(trained.peaks) <= limit
    assert extra <= mark.extra_flops
    share = max(trained.peaks) / max(plain.peaks)
    remark = f"{share:.1%} of plain eager, extra flops {extra:.1%}"
    line(mark.group, mark.name, EQUAL, remark=remark)
