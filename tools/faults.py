"""Make deliberate faults in a copy of the source, one by one, and run the tests that have to see them.

``python tools/faults.py [PATTERN …]``: faults whose name, room or file contains one of these; ``--turn``: a
tenth of all, which ones depends on the hour of the commit. What survives is a hole in the tests, and fails.
The faults are tables of ``tests/faults/ROOM.toml``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
BELOW = "graph", "blocks", "sequence"  # of hybridremat, beside it in the repository
COPIED = "hybridremat", *BELOW, "tests", "tools", "benchmarks", "docs"
TURNS = 10
AT_ONCE = 2
MOST_SECONDS = 120  # a fault may make a search endless

PYTEST = (
    *("-x", "-q", "-n0", "-m", "", "-p", "no:cacheprovider"),
    *("--hypothesis-profile=faults", f"--timeout={MOST_SECONDS}"),
)
PASSED, FAILED = 0, 1


@dataclass(frozen=True)
class Fault:
    """A change of one place in the source, and the tests of which one has to fail with it."""

    room: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    why: str

    def applied(self, source: str) -> str:
        """The source with the fault.

        Raises
        ------
        ValueError
            If what it replaces is not there exactly once.
        """
        if (times := source.count(self.old)) != 1:
            raise ValueError(f"{self.room}: {self.name}: {self.file} has its old text {times} times")
        return source.replace(self.old, self.new)


def known_faults(folder: Path = ROOT / "tests" / "faults") -> list[Fault]:
    """All faults, room by room."""
    return [
        Fault(file.stem, **{**entry, "tests": tuple(entry["tests"])})
        for file in sorted(folder.glob("*.toml"))
        for entry in tomllib.loads(file.read_text(encoding="utf-8"))["fault"]
    ]


def copied(folder: Path) -> Path:
    """A copy of what tests need, in which the rooms beside hybridremat are found below it."""
    ignored = shutil.ignore_patterns("__pycache__", "_build")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in BELOW:
        (folder / "hybridremat" / name).symlink_to(folder / name)
    shutil.copy2(ROOT / "pyproject.toml", folder)
    return folder


def tested(copy: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """The outcome of some tests in a copy."""
    paths = [str(copy), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *PYTEST, *tests]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def outcome(copy: Path, fault: Fault, number: int) -> tuple[str, float, str]:
    """Whether a fault is "caught", "survived", or is "broken" (no test ran); seconds; what pytest says."""
    file, started = copy / fault.file, time.perf_counter()
    source, stamp = file.read_text(encoding="utf-8"), file.stat().st_mtime
    try:
        file.write_text(fault.applied(source), encoding="utf-8")
        os.utime(file, (number, number))  # compiled files go by time and size, which two faults may share
        done = tested(copy, fault.tests)
    finally:
        file.write_text(source, encoding="utf-8")
        os.utime(file, (stamp, stamp))
    found = {PASSED: "survived", FAILED: "caught"}.get(done.returncode, "broken")
    return found, time.perf_counter() - started, done.stdout + done.stderr


def of_turn(faults: list[Fault]) -> list[Fault]:
    """The tenth whose turn it is at the hour of the commit."""
    when = subprocess.check_output(["git", "show", "-s", "--format=%ct"], cwd=ROOT, text=True)
    return faults[int(when) // 3600 % TURNS :: TURNS]


def main() -> None:
    """Run them, two at a time; first what is to fail has to pass."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("patterns", nargs="*", metavar="PATTERN")
    parser.add_argument("--turn", action="store_true", help="a tenth of all")
    asked = parser.parse_args()
    faults = [
        fault
        for fault in known_faults()
        if not asked.patterns
        or any(text in f"{fault.room} {fault.file} {fault.name}" for text in asked.patterns)
    ]
    faults = of_turn(faults) if asked.turn else faults
    if not faults:
        sys.exit("no fault has such a name")
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(AT_ONCE):
            copies.put(copied(Path(name) / str(number)))

        def sound(tests: tuple[str, ...]) -> str:
            copy = copies.get()
            done = tested(copy, tests)
            copies.put(copy)
            return done.stdout + done.stderr if done.returncode != PASSED else ""

        every = sorted({test for fault in faults for test in fault.tests})
        halves = (tuple(every[number::AT_ONCE]) for number in range(AT_ONCE))
        if wrong := "".join(pool.map(sound, filter(None, halves))):
            sys.exit(f"{wrong}\nthese tests do not pass without any fault")
        print(f"{len(every)} tests pass without a fault", flush=True)

        def run(pair: tuple[int, Fault]) -> bool:
            number, fault = pair
            copy = copies.get()
            found, seconds, said = outcome(copy, fault, number)
            copies.put(copy)
            print(f"{found:8}  {seconds:5.1f} s  {fault.room}: {fault.name}", flush=True)
            if found != "caught":
                print("\n".join([fault.why, *said.splitlines()[-15:]]), flush=True)
            return found == "caught"

        missed = [*pool.map(run, enumerate(faults, 1))].count(False)
    print(f"{len(faults) - missed} of {len(faults)} faults are caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
