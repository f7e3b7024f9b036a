"""Language models."""

from __future__ import annotations

import cases_decoders
import cases_encoders

CASES = [*cases_decoders.CASES, *cases_encoders.CASES]
