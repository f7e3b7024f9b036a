"""Lay the package out for a static checker: ``.typing/hybridremat`` as symlinks to the four folders.

Run from anywhere; the tree is made anew each time. See ``[tool.mypy]`` in pyproject.toml for why.
"""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BELOW = ("graph", "blocks", "sequence")


def main() -> None:
    """Make the tree."""
    tree = ROOT / ".typing"
    shutil.rmtree(tree, ignore_errors=True)
    package = tree / "hybridremat"
    package.mkdir(parents=True)
    for entry in sorted((ROOT / "hybridremat").iterdir()):
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(Path("../../hybridremat") / entry.name)
    for folder in BELOW:
        (package / folder).symlink_to(Path("../..") / folder, target_is_directory=True)


if __name__ == "__main__":
    main()
