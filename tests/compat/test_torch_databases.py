"""Every module and op of PyTorch's databases, in tiny nets, held to plain training at the least limit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from support.compat.harness import EQUAL

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PARTS = 48
KNOWN = json.loads(Path(__file__).with_name("torch_databases.json").read_text(encoding="utf-8"))
"""Entries that do not come out bit-equal to plain eager: what their outcome begins with, and why."""


@pytest.mark.parametrize("part", range(PARTS))
def test_entries_train_as_plain_at_their_least_limit(part, line):
    """Three parts, 60 entries spread over all, in CI; all parts in `make test-long`."""
    from support.compat.torch_databases import entries, hold_to_plain  # takes seconds

    known = {name: (each["outcome"], each["why"]) for each in KNOWN for name in each["names"]}
    found, wrong = Counter[str](), []
    for entry in entries()[part::PARTS]:
        torch._dynamo.reset()
        try:
            outcome = hold_to_plain(entry)
        except Exception as error:  # noqa: BLE001 - whatever it is, the next entry is tried, too
            outcome = f"{type(error).__name__}: {error}"
        expected, why = known.get(entry.name, (EQUAL, EQUAL))
        found[why] += 1
        if not outcome.startswith(expected):
            wrong.append(f"{entry.name} was to be {expected!r}, and is {outcome!r}")
    assert not wrong, "\n".join(wrong)
    line("PyTorch's databases", f"part {part}", "", counts=found)


@pytest.mark.long
def test_known_entries_are_there():
    from support.compat.torch_databases import entries

    named = [name for each in KNOWN for name in each["names"]]
    assert {*named} <= {entry.name for entry in entries()}
    assert len(named) == len({*named})
