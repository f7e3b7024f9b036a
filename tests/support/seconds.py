"""Tests that take seconds, of which there are too many for `make test` to end in minutes.

CI runs them, as part of `make test-slow`. Which they are was measured: `make test-times` writes
`tests/data/seconds.json`. A test marked ``everyday`` stays in `make test` whatever it takes.

Of the slowest (`tests/data/heavy.json`, by `make test-slow-times`) CI runs a part, in turn: it has to end on
machines that are half as fast as others. `make test-slow` runs them all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MOST: Final = 1.1
"""Seconds that a test of `make test` may take by itself, without its fixtures."""

FILE: Final = Path(__file__).parents[1] / "data" / "seconds.json"

HEAVY: Final = FILE.with_name("heavy.json")

MOST_EACH_TIME: Final = 6.0
"""Seconds, with its fixtures, that a test may take which CI runs each time; on a slow machine."""

TURNS: Final = 5
"""In so many runs of CI all of the others have had their turn."""

SHARDED: Final = "tests/test_sharded_units.py"

HEAVY_FIXTURES: Final = (
    *((SHARDED, name) for name in ("quick", "more", "few_ranks", "other_ranks", "split", "split_ranks")),
    ("tests/test_ddp_overlap.py", "ranks"),
    ("tests/test_ranks.py", "ranks"),
    ("tests/test_gathers.py", "together"),
    (SHARDED, "few_sections"),
)
"""Fixtures of a module that take minutes: all tests that use one have one turn."""

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


def takes_seconds(path: str, name: str, fixtures: set[str], known: Mapping[str, Mapping[str, float]]) -> bool:
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


def waiting(known: Mapping[str, Mapping[str, float]], turn: int) -> set[str]:
    """The ids of heavy tests whose turn it is not; neighbours, which are alike, have different turns."""
    ids = [f"{path}::{name}" for path, tests in known.items() for name in tests]
    return {each for number, each in enumerate(ids) if number % TURNS != turn % TURNS}


def of_fixture(path: str, fixtures: set[str]) -> int | None:
    """The turn of the tests that use a heavy fixture of a file; None for others."""
    every = enumerate(HEAVY_FIXTURES)
    return next((turn for turn, (file, name) in every if file == path and name in fixtures), None)
