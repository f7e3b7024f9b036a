"""Where files are kept between runs. Apart from what is kept there: to ask for it loads no torch."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where files are kept: ``HYBRIDREMAT_CACHE``, or the platform's cache folder."""
    if named := os.environ.get("HYBRIDREMAT_CACHE"):
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("hybridremat"))
