"""Many models put together at random; tests/test_random_models.py tries a few small ones."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from support.random_models import recipes
from support.random_training import FEW, hold_to_plain

MANY = settings(FEW, max_examples=80)


@pytest.mark.compat
def test_random_models(line):
    shares = []

    @MANY
    @given(recipes(longest=16))
    def run(recipe):
        shares.append(hold_to_plain(recipe, steps=3))

    run()
    line(
        "Robustness",
        f"{len(shares)} models put together at random",
        "bit-equal to plain eager, at most the limit",
        remark=f"three limits each; least: {100 * min(shares):.0f} to {100 * max(shares):.0f} % of plain",
    )
