"""The command ``doctor``: what is installed here, what works, and what to do where something does not."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib import import_module

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridremat.cli import doctor_tools as tools
from hybridremat.cli import doctor_versions as versions
from hybridremat.cli.doctor_checks import FAILED, MISSING, SKIPPED, Check, checked
from hybridremat.cli.output import print_json, stdout_to_stderr
from hybridremat.errors import TargetError

_STYLES = {"ok": "green", FAILED: "bold red", MISSING: "yellow", SKIPPED: "dim"}
_LOOKS: dict[str, tuple[Callable[[], Check], str]] = {
    "python": (versions.look_at_python, ""),
    "packages": (versions.look_at_packages, "pip install hybridremat"),
    "transformers": (versions.look_at_transformers, "pip install transformers"),
    "torch": (versions.look_at_torch, "install torch again (https://pytorch.org/get-started)"),
    "device": (versions.look_at_devices, "try nvidia-smi, and a build of torch for its CUDA version"),
    "C++ compiler": (tools.look_at_cxx, "install g++ anew, or leave compiler= out"),
    "Triton": (tools.look_at_triton, "pip install triton, in the version that torch names"),
    "caches": (tools.look_at_caches, "name a folder that you can write to: HYBRIDREMAT_CACHE"),
}


def run_doctor(options: Namespace) -> int:
    """Look at everything, print what was found, and return 1 if something failed that should work.

    Raises
    ------
    TargetError
        If ``--device`` names another device than cpu or cuda.
    """
    if options.device not in (None, "cpu", "cuda"):
        raise TargetError(f"--device {options.device}: give cpu or cuda")
    with stdout_to_stderr(active=options.json):  # compilers print
        checks = list(_checks(options))
    failed = [check.name for check in checks if check.status == FAILED]
    if options.json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        _print(checks, failed)
    return 1 if failed else 0


def _checks(options: Namespace) -> Iterator[Check]:
    console = Console(stderr=True, quiet=options.quiet)

    def shown(name: str) -> AbstractContextManager[object]:
        return console.status(f"looking at {name}") if console.is_terminal else nullcontext()

    found: dict[str, Check] = {}
    for name, (look_at, advice) in _LOOKS.items():
        with shown(name):
            found[name] = checked(name, look_at, advice)
        yield found[name]
    for name, try_it in _steps(options, found).items():
        with shown(name):
            yield try_it() if callable(try_it) else Check(name, SKIPPED, try_it)


def _steps(options: Namespace, found: dict[str, Check]) -> dict[str, Callable[[], Check] | str]:
    """For the step op by op and the compiled one: what tries it, or why it is not tried."""
    device = options.device or str(found["device"].figures.get("kind", "cpu"))
    compiler = "Triton" if device == "cuda" else "C++ compiler"
    first, second = f"step, {device}", f"compiled step, {device}"
    if any(found[name].figures == {} and found[name].status == FAILED for name in ("torch", "packages")):
        return dict.fromkeys((first, second), "it needs the packages above")
    advice = "see above what failed; docs/troubleshooting.md; -v shows the traceback"
    tried: dict[str, Callable[[], Check] | str] = {
        first: lambda: checked(first, lambda: _step("try_step", device), advice),
        second: lambda: checked(second, lambda: _step("try_compiled_step", device), advice),
    }
    if options.no_compile:
        tried[second] = "--no-compile"
    elif found[compiler].status == MISSING:
        tried[second] = f"there is no {compiler}"
    return tried


def _step(function: str, device: str) -> Check:
    """Run one of the two steps; they import torch, which may be what is broken."""
    run: Callable[[str], Check] = getattr(import_module("hybridremat.cli.doctor_steps"), function)
    return run(device)


def _print(checks: Sequence[Check], failed: Sequence[str]) -> None:
    from hybridremat.reports.text import render

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("what", "", "found"):
        table.add_column(title)
    for check in checks:
        advice = f"\n→ {check.advice}" if check.advice else ""
        status = Text(check.status, style=_STYLES[check.status])
        table.add_row(Text(check.name), status, Text(f"{check.found}{advice}"))
    end = f"Failed: {', '.join(failed)}." if failed else "All that should work here works."
    render([table, Text(end)], sys.stdout)
