"""Every architecture of the compatibility table, held to plain training."""

from __future__ import annotations

import pytest

from support.compat import cases_language, cases_vision, cases_wiring
from support.compat.harness import hold_to_plain, parameters

CASES = [*cases_language.CASES, *cases_vision.CASES, *cases_wiring.CASES]


@pytest.mark.parametrize("case", parameters(CASES))
def test_architecture(case, line):
    figures = hold_to_plain(case)
    line(case.group, case.name, figures.pop("outcome"), remark=case.remark, **figures)
