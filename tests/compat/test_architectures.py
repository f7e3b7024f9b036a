"""Every architecture of the compatibility table, held to plain training."""

from __future__ import annotations

import cases_language
import cases_vision
import cases_wiring
import pytest
from harness import hold_to_plain, parameters

CASES = [*cases_language.CASES, *cases_vision.CASES, *cases_wiring.CASES]


@pytest.mark.parametrize("case", parameters(CASES))
def test_architecture(case, line):
    figures = hold_to_plain(case)
    line(case.group, case.name, figures.pop("outcome"), remark=case.remark, **figures)
