"""Packages that only `make compat` installs, and the rows of the compatibility table."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

# dill, which hashes TRL's data sets, takes what lies in a folder of this name for installed; it pickles the
# whole of any other module, and cannot with pyarrow.
EXTRA = Path(
    os.environ.get("HYBRIDREMAT_COMPAT_PACKAGES", Path(__file__).parents[2] / ".compat" / "site-packages")
)

if (EXTRA / "torchvision").is_dir():
    # torchvision has no CPU build for this torch; its Python part runs once these two ops are declared.
    sys.path.append(str(EXTRA))
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold, Tensor scale, int zero_point) -> Tensor"
    )


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
