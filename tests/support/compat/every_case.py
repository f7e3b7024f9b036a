"""Every model of the compatibility table that is a case, with the packages that they need importable."""

import support.compat.packages  # noqa: F401 - makes them importable
from support.compat import cases_language, cases_today, cases_vision, cases_wiring

EVERY = [*cases_language.CASES, *cases_today.CASES, *cases_vision.CASES, *cases_wiring.CASES]
