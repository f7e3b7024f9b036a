"""A small model of each family of transformers, held to plain training at 80 % of its step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.compat.families import LEFT_OUT, hold_to_plain, names

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

KNOWN = json.loads(Path(__file__).with_name("families.json").read_text(encoding="utf-8"))
"""What does not come out bit-equal: how its outcome begins, and why; and what is left out."""
MADE_UP = (
    "left out: its fields' names do not make it small, or plain PyTorch does not train it with made-up inputs"
)
BIT_EQUAL = "bit-equal to"  # plain eager, or, where that depends on the CPU, PyTorch's unplanned joint graph
NEEDS_PACKAGES = f"{LEFT_OUT}: ImportError"
IN_CI = {"llama", "marian", "vit"}


def parameters() -> list[object]:
    """Three families in CI, all in `make test-long`."""
    return [pytest.param(each, marks=() if each in IN_CI else pytest.mark.long) for each in names()]


@pytest.mark.parametrize("family", parameters())
def test_a_family_trains_as_plain(family, line):
    known = {name: (each["outcome"], each["why"]) for each in KNOWN["exceptions"] for name in each["names"]}
    known |= {name: (f"{LEFT_OUT}: {error}", MADE_UP) for name, error in KNOWN["left out"].items()}
    expected, why = known.get(family, (BIT_EQUAL, ""))
    torch._dynamo.reset()
    try:
        outcome = hold_to_plain(family)
    except Exception as error:  # noqa: BLE001 - whatever it is, it may be known
        outcome = f"{type(error).__name__}: {error}"
    if outcome.startswith(NEEDS_PACKAGES) and not expected.startswith(NEEDS_PACKAGES):
        pytest.skip(f"{outcome}; `make compat` installs it")
    assert outcome.startswith(expected)
    line("Families of transformers", family, "", counts={why or outcome: 1})


@pytest.mark.long
def test_known_families_are_there():
    named = [name for each in KNOWN["exceptions"] for name in each["names"]] + [*KNOWN["left out"]]
    assert {*named} <= {*names()}
    assert len(named) == len({*named})
