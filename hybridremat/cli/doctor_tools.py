"""What ``hybridremat doctor`` finds of compilers, and of the folders in which things are kept."""

from __future__ import annotations

import getpass
import os
import shutil
import sysconfig
import tempfile
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from hybridremat.cli.doctor_checks import FAILED, MISSING, OK, Check, run_program, version_of
from hybridremat.files import cache_folder
from hybridremat.units import format_bytes

_PROGRAM = "#include <vector>\nint main() { return std::vector<int>(3).size() == 3 ? 0 : 1; }\n"


def look_at_cxx() -> Check:
    """The C++ compiler, with which Inductor builds kernels for CPUs; a small program is built."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return Check("C++ compiler", MISSING, "none on PATH", 'for compiler="inductor" on CPU: install g++')
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM, encoding="utf-8")
        run_program([*compiler.split(), str(source), "-o", str(Path(folder, "program"))])
        run_program([str(Path(folder, "program"))])
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        advice = "install Python's headers (python3-dev): kernels are loaded with them"
        return Check("C++ compiler", FAILED, f"{compiler} works; {header} is not there", advice)
    return Check("C++ compiler", OK, f"{compiler} works", figures={"path": compiler})


def look_at_triton() -> Check:
    """Triton, with which Inductor builds kernels for GPUs."""
    found = version_of("triton")
    if found is None:
        advice = 'for compiler="inductor" on a GPU: pip install triton'
        return Check("Triton", MISSING, "not installed", advice)
    import_module("triton")
    return Check("Triton", OK, found, figures={"version": found})


def look_at_caches() -> Check:
    """The folders of kept plans and compiled kernels, their sizes, and whether ours takes a file."""
    ours = cache_folder()
    ours.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=ours):
        pass
    sizes = {str(folder): _size(folder) for folder in (ours, _inductor_folder(), _triton_folder())}
    listed = (f"{folder}: {format_bytes(size)}" for folder, size in sizes.items())
    return Check("caches", OK, "\n".join(listed), figures=sizes)


def _inductor_folder() -> Path:
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(named)
    return Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")


def _triton_folder() -> Path:
    """Where Triton keeps kernels that Inductor did not ask for; Inductor's are in its own folder."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _size(folder: Path) -> int:
    """Bytes of the files in a folder, but for what other processes delete meanwhile."""
    found = 0
    for parent, _, names in os.walk(folder):  # goes on where a folder is gone, as rglob does not
        for name in names:
            with suppress(OSError):
                found += Path(parent, name).stat().st_size
    return found
