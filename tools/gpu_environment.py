"""An environment on top of one that has torch: hybridremat, and what is missing there, without network."""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOR_TESTS = ("pytest>=8.2", "hypothesis>=6.100")
BUILD = "setuptools>=77"  # builds the package; not in an environment of its own, which would need the network


class SetupError(Exception):
    """The environment cannot be made; the text says what to do."""


def needed() -> list[str]:
    """What has to be there besides torch, as pyproject.toml says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [name for name in project["dependencies"] if re.split(r"[<>=!~ ]", name)[0] != "torch"]
    return [*names, *FOR_TESTS, BUILD]


def make_environment(folder: Path, wheels: Path | None, seconds: float) -> Path:
    """Make or renew an environment on top of this interpreter's packages; returns its interpreter.

    Raises
    ------
    SetupError
        If a package is missing, there and among the wheels.
    """
    _run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(folder)], seconds)
    python = folder / "bin" / "python"
    _add_packages_of_this(folder)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    found = ["--find-links", str(wheels)] if wheels is not None else []
    _run([*pip, *found, *needed()], seconds, "collect them with `make gpu-wheels`, and pass WHEELS=folder")
    # Editable: what is tried is this tree, whatever was built from it before.
    own = ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    _run([*pip, *own], seconds, f"it is built with {BUILD}: put its wheel into WHEELS")
    return python


def _add_packages_of_this(folder: Path) -> None:
    """Let the environment see this interpreter's packages, pip among them.

    ``--system-site-packages`` shows those of the interpreter that *this* environment was made from, so not
    the torch of an environment.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = dict.fromkeys([*site.getsitepackages(), sysconfig.get_path("purelib")])
    lines = [f"import site; site.addsitedir({place!r})" for place in places]
    target = folder / "lib" / version / "site-packages" / "packages_of_torch.pth"
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run(command: list[str], seconds: float, advice: str = "") -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(f"{' '.join(command[:4])} … took more than {seconds:.0f} s") from error
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise SetupError(f"{' '.join(command[:5])} … failed:\n{last}\n{advice}".rstrip())
