"""Tests that take seconds, of which there are too many for `make test` to end in minutes.

CI runs them, as part of `make test-slow`. Which they are was measured: `make test-times` writes
`tests/data/seconds.json`. A test marked ``everyday`` stays in `make test` whatever it takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MOST: Final = 1.1
"""Seconds that a test of `make test` may take by itself, without its fixtures."""

FILE: Final = Path(__file__).parents[1] / "data" / "seconds.json"

FIXTURES: Final = {
    "tests/test_certificates.py": {"curve"},
    "tests/test_ranks.py": {"ranks"},
    "tests/test_sharded_units.py": {"few_sections", "quick", "split"},
}
"""Fixtures of a module that take so long that all tests that use them do."""


def measured(file: Path = FILE) -> dict[str, dict[str, float]]:
    """By file, the tests that take longer, with their seconds."""
    found: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def takes_seconds(
    path: str, name: str, fixtures: set[str], known: Mapping[str, Mapping[str, float]]
) -> bool:
    """Whether a test of a file is known to take long, by itself or with a fixture."""
    return name in known.get(path, {}) or bool(FIXTURES.get(path, set()) & fixtures)


def missing(known: dict[str, dict[str, float]], there: Mapping[str, set[str]]) -> list[str]:
    """What is known of tests that are gone; ``there``: names of all tests of a file, without their cases."""
    return [
        f"{path}::{name}"
        for path, tests in there.items()
        for name in known.get(path, {})
        if name.partition("[")[0] not in tests
    ]
