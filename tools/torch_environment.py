"""Set up an environment with a release of torch that constraints.txt does not name, for ``make test-torch``.

The package and everything that its tests need is installed there as in ``.venv``, in the same versions. The
range of torch in pyproject.toml is not looked at, so that the next release can be tried, and neither are
constraints in pip's own configuration, which may keep a new one away. setuptools is in the newest version
that this torch takes (2.11 and 2.12 want one below 82).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHOSEN_BY_TORCH = {"torch", "torchvision", "setuptools"}


def name_of(requirement: str) -> str:
    """``torch`` of ``torch>=2.11,<2.16``."""
    found = re.match(r"[\w.-]+", requirement)
    assert found, requirement
    return found[0].lower()


def constraints() -> list[str]:
    """The lines of constraints.txt that hold with every torch."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if "==" in line and name_of(line) not in CHOSEN_BY_TORCH]


def requirements() -> list[str]:
    """What the package and its tests need, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [needed for group in project["optional-dependencies"].values() for needed in group]
    return [n for n in (*project["dependencies"], *extras) if name_of(n) not in ("torch", project["name"])]


def set_up(folder: Path, torch: str, index: str | None) -> None:
    """Make or complete the environment in a folder."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    listed = folder / "constraints.txt"
    listed.write_text("\n".join([*constraints(), f"torch=={torch}"]) + "\n", encoding="utf-8")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    own = {**os.environ, "PIP_CONSTRAINT": str(listed)}  # instead of a configured one; -c would be beside it
    further = ["--extra-index-url", index] if index else []
    subprocess.run([*pip, *further, f"torch=={torch}", "setuptools>=77"], check=True, env=own)
    subprocess.run([*pip, *requirements()], check=True, env=own)
    subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", ROOT], check=True, env=own)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("torch", help="version, such as 2.11.0")
    parser.add_argument("--index", help="a further package index to take torch from")
    asked = parser.parse_args()
    set_up(asked.folder.resolve(), asked.torch, asked.index)


if __name__ == "__main__":
    main()
