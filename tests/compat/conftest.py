"""Packages that only `make compat` installs, and the rows of the compatibility table."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from support.compat.packages import EXTRA


@pytest.fixture
def quantizers(monkeypatch):
    """Makes packages of quantized weights importable, for one test: transformers imports what it finds."""
    monkeypatch.syspath_prepend(EXTRA / "quantized")


@pytest.fixture
def line(request):
    """Keeps a line of the compatibility table: ``line(group, name, outcome, **figures)``.

    Lines are written where HYBRIDREMAT_COMPAT_RESULTS says (tools/compat_table.py reads them).
    """

    def keep(group: str, name: str, outcome: str, **figures: object) -> None:
        folder = os.environ.get("HYBRIDREMAT_COMPAT_RESULTS")
        if not folder:
            return
        Path(folder).mkdir(parents=True, exist_ok=True)
        row = {"group": group, "name": name, "outcome": outcome, "test": request.node.nodeid, **figures}
        file = re.sub(r"\W+", "-", f"{group} {name}").lower() + ".json"
        (Path(folder) / file).write_text(json.dumps(row, indent=1))

    return keep
