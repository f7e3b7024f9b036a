"""Packages that only `make compat` installs; importing this makes them importable."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

# dill, which hashes TRL's data sets, takes what lies in a folder of this name for installed; it pickles the
# whole of any other module, and cannot with pyarrow.
EXTRA = Path(
    os.environ.get("HYBRIDREMAT_COMPAT_PACKAGES", Path(__file__).parents[3] / ".compat" / "site-packages")
)

if (EXTRA / "torchvision").is_dir():
    # torchvision has no CPU build for this torch; its Python part runs once these two ops are declared.
    sys.path.append(str(EXTRA))
    LIBRARY = torch.library.Library("torchvision", "DEF")
    LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    LIBRARY.define(
        "qnms(Tensor dets, Tensor scores, float iou_threshold, Tensor scale, int zero_point) -> Tensor"
    )
