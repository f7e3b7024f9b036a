"""What ``hybridremat doctor`` finds installed: Python, packages, torch, devices.

torch loads when it is looked at: a broken one is a finding.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires

from hybridremat.cli.doctor_checks import FAILED, MISSING, OK, Check, run_program, version_of
from hybridremat.units import format_bytes
from hybridremat.version import __version__

NEEDED = ("ortools", "cattrs", "jinja2", "networkx", "numpy", "platformdirs", "rich")


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
    versions = {name: found for name in NEEDED if (found := version_of(name))}
    if broken:
        advice = f"pip install {' '.join(name.split(' ')[0] for name in broken)}"
        return Check("packages", FAILED, f"cannot be imported: {'; '.join(broken)}", advice)
    listed = ", ".join(f"{name} {found}" for name, found in versions.items())
    return Check("packages", OK, f"hybridremat {__version__}; {listed}", figures=versions)


def look_at_transformers() -> Check:
    """transformers, which only the built-in models and the demo need."""
    found = version_of("transformers")
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
        said = run_program([program, "--query-gpu=driver_version", "--format=csv,noheader"])
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
