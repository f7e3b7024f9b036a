"""Language models."""

from __future__ import annotations

from support.compat import cases_decoders, cases_encoders

CASES = [*cases_decoders.CASES, *cases_encoders.CASES]
