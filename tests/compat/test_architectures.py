"""Every architecture of the compatibility table, held to plain training."""

from __future__ import annotations

import pytest

from support.compat import cases_language, cases_today, cases_vision, cases_wiring
from support.compat.harness import hold_to_plain, parameters

CASES = [*cases_language.CASES, *cases_vision.CASES, *cases_wiring.CASES, *cases_today.CASES]


LONGER = {
    "drop-path and BatchNorm around residuals, by hand",
    "torch.library op with an effect that its schema does not show",
    "tied embeddings, a block called twice",
    "LSTM unrolled by hand, 4 steps",
}  # another fast test has their mechanism in it, or one close to it


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("case", parameters(CASES, LONGER))
def test_architecture(case, line):
    figures = hold_to_plain(case)
    line(case.group, case.name, figures.pop("outcome"), remark=case.remark, **figures)
