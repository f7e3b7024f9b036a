"""What ``hybridremat doctor`` looks at before it runs a step: versions, devices, compilers, caches.

Nothing but the standard library loads here until a check is run: a broken torch is a finding, no traceback.
"""

from __future__ import annotations

import getpass
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from hybridremat.errors import HybridRematError
from hybridremat.files import cache_folder
from hybridremat.units import format_bytes
from hybridremat.version import __version__

logger = logging.getLogger(__name__)

OK, MISSING, FAILED, SKIPPED = "ok", "missing", "failed", "skipped"
NEEDED = ("ortools", "cattrs", "jinja2", "networkx", "numpy", "platformdirs", "rich")
SECONDS = 60  # for a program that is started to look whether it works
_PROGRAM = "#include <vector>\nint main() { return std::vector<int>(3).size() == 3 ? 0 : 1; }\n"


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes
    ----------
    status
        ``ok``; ``missing``: not there, and not needed; ``failed``; ``skipped``.
    found
        What was found, in words.
    advice
        What to do, if it failed or is missing.
    figures
        What was measured, for ``--json``; sizes in bytes.
    """

    name: str
    status: str
    found: str
    advice: str = ""
    figures: Mapping[str, object] = field(default_factory=dict)


def checked(name: str, look: Callable[[], Check], advice: str) -> Check:
    """The finding of a look; an error in it is a finding too, with ``advice``."""
    try:
        return look()
    except (Exception, SystemExit) as error:  # a broken installation raises anything at all
        logger.info("%s", name, exc_info=True)
        text = " ".join(str(error).split())
        own = "" if isinstance(error, HybridRematError) else f"{type(error).__name__}: "
        return Check(name, FAILED, f"{own}{text}", advice)


def look_at_python() -> Check:
    """The interpreter."""
    found = f"{platform.python_version()}, {sys.executable}, {platform.system()} {platform.machine()}"
    return Check("python", OK, found, figures={"version": platform.python_version()})


def look_at_packages() -> Check:
    """hybridremat, and the packages that it needs besides torch: whether all can be imported."""
    broken = []
    for name in NEEDED:
        try:
            import_module(name)
        except Exception as error:  # noqa: BLE001 - as in `checked`
            broken.append(f"{name} ({type(error).__name__}: {error})")
    versions = {name: found for name in NEEDED if (found := _version(name))}
    if broken:
        advice = f"pip install {' '.join(name.split(' ')[0] for name in broken)}"
        return Check("packages", FAILED, f"cannot be imported: {'; '.join(broken)}", advice)
    listed = ", ".join(f"{name} {found}" for name, found in versions.items())
    return Check("packages", OK, f"hybridremat {__version__}; {listed}", figures=versions)


def look_at_transformers() -> Check:
    """transformers, which only the built-in models and the demo need."""
    found = _version("transformers")
    if found is None:
        advice = "for built-in models: pip install transformers"
        return Check("transformers", MISSING, "not installed", advice)
    return Check("transformers", OK, found, figures={"version": found})


def look_at_torch() -> Check:
    """PyTorch, and whether it is a version that this one of hybridremat is made for."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__}, {build}, {torch.get_num_threads()} threads"
    figures = {"version": torch.__version__, "cuda": torch.version.cuda}
    asked = _range_of_torch()
    if asked is not None and not _in_range(torch.__version__, asked):
        advice = f"hybridremat {__version__} is made for torch{asked}; others may be captured in another way"
        return Check("torch", FAILED, found, advice, figures)
    return Check("torch", OK, found, figures=figures)


def look_at_devices() -> Check:
    """The CUDA devices that torch sees, their driver and their memory; or why there is none."""
    import torch

    driver = _driver()
    if torch.cuda.is_available():
        return _cuda_devices(driver)
    if driver:
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch cannot use it"
        advice = "install a build of torch for the CUDA version of this driver (nvidia-smi names it)"
        return Check("device", FAILED, f"there is an NVIDIA driver ({driver}), and {why}", advice)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Check("device", OK, f"no CUDA device; CPU, {cores} cores", figures={"kind": "cpu", "cores": cores})


def look_at_cxx() -> Check:
    """The C++ compiler, with which Inductor builds kernels for CPUs; a small program is built."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return Check("C++ compiler", MISSING, "none on PATH", 'for compiler="inductor" on CPU: install g++')
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "program.cpp")
        source.write_text(_PROGRAM, encoding="utf-8")
        _run([*compiler.split(), str(source), "-o", str(Path(folder, "program"))])
        _run([str(Path(folder, "program"))])
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        advice = "install Python's headers (python3-dev): kernels are loaded with them"
        return Check("C++ compiler", FAILED, f"{compiler} works; {header} is not there", advice)
    return Check("C++ compiler", OK, f"{compiler} works", figures={"path": compiler})


def look_at_triton() -> Check:
    """Triton, with which Inductor builds kernels for GPUs."""
    found = _version("triton")
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _range_of_torch() -> str | None:
    """``>=2.13,<2.14``, as installed; None where hybridremat is not installed as a package."""
    try:
        needs = requires("hybridremat") or []
    except PackageNotFoundError:
        return None
    found = [need for need in needs if need.startswith("torch") and ";" not in need]
    return found[0].removeprefix("torch") if found else None


def _in_range(torch: str, asked: str) -> bool:
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:  # not among our dependencies, and nothing but this check needs it
        return True
    return SpecifierSet(asked).contains(torch.partition("+")[0], prereleases=True)


def _driver() -> str:
    """The version of the NVIDIA driver; empty if there is none, or nothing that tells."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        said = _run([program, "--query-gpu=driver_version", "--format=csv,noheader"])
    except RuntimeError:
        return ""
    return said.split("\n")[0].strip()


def _cuda_devices(driver: str) -> Check:
    import torch

    devices, listed = [], []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        name, capability = about.name, f"{about.major}.{about.minor}"
        devices.append({"name": name, "capability": capability, "free": free, "total": total})
        room = f"{format_bytes(free)} of {format_bytes(total)} free"
        listed.append(f"{index}: {name}, capability {capability}, {room}")
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    listed.append(f"driver {driver or 'unknown'}; allocator settings: {settings or 'defaults'}")
    figures = {"kind": "cuda", "devices": devices, "driver": driver, "allocator": settings}
    return Check("device", OK, "\n".join(listed), figures=figures)


def _run(command: list[str]) -> str:
    """What a program prints.

    Raises
    ------
    RuntimeError
        If it fails, or takes too long.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{command[0]} does not run: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed with {done.returncode}: {done.stderr.strip()[-300:]}")
    return done.stdout


def _inductor_folder() -> Path:
    if named := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(named)
    return Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")


def _triton_folder() -> Path:
    """Where Triton keeps kernels that Inductor did not ask for; Inductor's are in its own folder."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def _size(folder: Path) -> int:
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.stat().st_size if path.is_file() else 0
        except OSError:  # deleted by another process meanwhile
            continue
    return found
