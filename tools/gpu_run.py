"""``make gpu``: all that is to be tried on a GPU, in one command, without network and within ten minutes.

    python tools/gpu_run.py [--device cuda] [--wheels FOLDER] [--out FOLDER] [--parts doctor,tests,benchmark]

``python`` is one that has torch. An environment is made that uses it; then each part runs, with a time of its
own: ``hybridremat doctor``, the tests marked ``cuda``, ``benchmarks/gpu.py``. What a part has written stays,
whatever becomes of the others. ``--device cpu`` is the dry run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from gpu_environment import ROOT, SetupError, make_environment

SECONDS = 585.0
LIMITS = {"setup": 120.0, "doctor": 100.0, "tests": 180.0}  # the benchmark gets what is left,
DRY_BENCHMARK = 125.0  # in the dry run no more than this
CLOSING = 8.0
NO_DEVICE = 2
ALLOCATOR = "expandable_segments:True"  # blocks are split to 512 bytes: sizes are what plans count


@dataclass(frozen=True)
class Part:
    """How one part ended."""

    name: str
    status: str
    seconds: float


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--wheels", type=Path, help="folder with wheels of what is missing (make gpu-wheels)")
    add("--out", type=Path, default=ROOT / "build" / "gpu", help="folder of the results")
    add("--environment", type=Path, default=ROOT / "build" / "gpu-environment")
    add("--parts", default="doctor,tests,benchmark", help="some of these")
    add("--seconds", type=float, default=SECONDS, help=f"for all (default: {SECONDS:.0f})")
    add("--benchmark-args", default="", help="more options of benchmarks/gpu.py, such as --resume")
    return parser.parse_args(arguments)


def commands(device: str, out: Path, python: Path, more: str = "") -> dict[str, Callable[[float], list[str]]]:
    """The command of each part, given the seconds that it may take."""
    start, on_cpu = [str(python), "-u"], device == "cpu"
    marked = "not slow and not compat" if on_cpu else "cuda"
    return {
        "doctor": lambda _: [*start, "-m", "hybridremat", "doctor", "--json", "--device", device]
        + (["--no-compile"] if on_cpu else []),
        "tests": lambda _: [
            *(*start, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", marked),
            *("--durations=10", f"--junitxml={out / 'tests.xml'}"),
            *("tests/test_cuda.py", "tests/test_sharded_models.py"),
        ],
        "benchmark": lambda seconds: [
            *(*start, "benchmarks/gpu.py", "--device", device, "--out", str(out)),
            *("--seconds", f"{seconds - CLOSING:.0f}", *(["--small"] if on_cpu else []), *more.split()),
        ],
    }


def run(command: list[str], seconds: float, log: IO[str], environment: dict[str, str]) -> tuple[str, str]:
    """Run a command, its output shown and logged; returns its status and its standard output.

    It is ended with all that it started if it takes longer.
    """
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    lines: list[str] = []
    reader = threading.Thread(target=_copy, args=(process.stdout, lines, log), daemon=True)
    reader.start()
    try:
        process.wait(seconds)
        status = "passed" if process.returncode == 0 else f"failed ({process.returncode})"
    except subprocess.TimeoutExpired:
        status = f"stopped after {seconds:.0f} s"
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(5)
    return status, "".join(lines)


def _copy(stream: IO[str], lines: list[str], log: IO[str]) -> None:
    for line in stream:
        lines.append(line)
        for target in (sys.stdout, log):
            target.write(line)
            target.flush()


def keep_doctor(text: str, out: Path) -> None:
    """Write the JSON in what the doctor printed as a file; what libraries print beside it is left out."""
    start = text.find("\n{\n") + 1 if not text.startswith("{") else 0
    end = text.rfind("\n}\n")
    with suppress(ValueError):
        found = json.loads(text[start : end + 3])
        (out / "doctor.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def environment_for(folder: Path) -> dict[str, str]:
    """The variables of the parts: caches of their own, and the allocator's settings unless they are given."""
    found = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if "PYTORCH_CUDA_ALLOC_CONF" not in found:  # the older name of the same
        found.setdefault("PYTORCH_ALLOC_CONF", ALLOCATOR)
    found["HYBRIDREMAT_CACHE"] = str(folder / "cache")
    found.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    found["PATH"] = f"{folder / 'bin'}{os.pathsep}{found.get('PATH', '')}"
    return found


def has_cuda() -> bool:
    """Whether the torch of this interpreter sees a CUDA device; asked in a process of its own."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main(arguments: list[str] | None = None) -> int:
    """Run all parts; 0 if all passed, 1 if one did not, 2 if there is no CUDA device."""
    options, started = options_of(arguments), time.monotonic()
    if options.device == "cuda" and not has_cuda():
        print(f"{sys.executable} has no torch that sees a CUDA device here. The dry run: make gpu DEVICE=cpu")
        return NO_DEVICE
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with (out / "log.txt").open("w", encoding="utf-8") as log:
        parts = _run_parts(options, out, log, lambda: options.seconds - (time.monotonic() - started))
    (out / "summary.json").write_text(json.dumps([asdict(part) for part in parts], indent=1) + "\n")
    for part in parts:
        print(f"{part.name:10} {part.status}, {part.seconds:.0f} s")
    print(f"Results: {out}")
    return 0 if all(part.status == "passed" for part in parts) else 1


def _run_parts(options: argparse.Namespace, out: Path, log: IO[str], left: Callable[[], float]) -> list[Part]:
    began = time.monotonic()
    try:
        python = make_environment(options.environment.resolve(), options.wheels, LIMITS["setup"])
    except SetupError as error:
        print(error)
        log.write(f"{error}\n")
        return [Part("setup", "failed", time.monotonic() - began)]
    parts = [Part("setup", "passed", time.monotonic() - began)]
    environment = environment_for(options.environment.resolve())
    for name, command in commands(options.device, out, python, options.benchmark_args).items():
        if name not in options.parts.split(","):
            continue
        most = DRY_BENCHMARK if name == "benchmark" and options.device == "cpu" else left()
        began, seconds = time.monotonic(), min(LIMITS.get(name, most), left() - CLOSING)
        if seconds <= 2 * CLOSING:
            parts.append(Part(name, "not reached", 0.0))
            continue
        print(f"=== {name}, at most {seconds:.0f} s", flush=True)
        status, text = run(command(seconds), seconds, log, environment)
        if name == "doctor":
            keep_doctor(text, out)
        parts.append(Part(name, status, time.monotonic() - began))
    return parts


if __name__ == "__main__":
    sys.exit(main())
