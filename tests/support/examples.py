"""How many examples property tests try: all of them in `make test-long`, a share in `make test` and CI."""

from __future__ import annotations

from hypothesis import settings

PROFILES = {"quick": 20, "full": 100}
"""Examples in percent, under the names that --hypothesis-profile takes."""


def examples(count: int, least: int = 1, **how: object) -> settings:
    """Settings for ``count`` examples, or for the profile's share of them."""
    share = settings.default.max_examples  # type: ignore[union-attr]
    return settings(max_examples=max(least, count * share // 100), **how)
