"""Damage plan files in many ways, and read and show each: a plan, or a typed error, in a moment.

``python tools/fuzz_plans.py --cases 10000`` prints what became of them, and of what went wrong one seed for
each place in the code. ``--seed N --cases 1`` repeats one.
"""

from __future__ import annotations

import argparse
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests")]

from support.damaged_plans import Corpus, applied, corpus, used  # noqa: E402 - found by the path above

HANGS = 30  # seconds; to certify and to train takes some by itself


def _hung(*_: object) -> None:
    raise TimeoutError(f"not done in {HANGS} s")


def place_of(error: BaseException) -> str:
    """The kind of an error, and the line of ours that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if ".venv" not in f.filename and "/lib/python" not in f.filename]
    return f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno} ({str(error)[:100]})"


def outcome(content: bytes, path: Path, name: str, *, fully: bool) -> str:
    """What becomes of a file; ``fully``: it is shown in every way, certified and trained with, too."""
    path.write_bytes(content)
    end = used(path, fully=fully)
    if fully and end != "refused" and name not in ("moves", "compiled"):
        end += f", {applied(path, name)}"
    return end


def main() -> int:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--fully", type=int, default=20, help="every how many-th is used in all ways")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _hung)
    ends: Counter[str] = Counter()
    wrong: dict[str, tuple[int, str]] = {}
    slowest: list[tuple[float, int, str]] = []
    with tempfile.TemporaryDirectory() as name:
        files = Corpus.of(corpus(Path(name)))
        path = Path(name) / "plan.json"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for seed in range(asked.seed, asked.seed + asked.cases):
            what, content = files.damaged(seed)
            fully, start = seed % asked.fully == 0, time.perf_counter()
            signal.alarm(HANGS)
            try:
                end = outcome(content, path, what.partition(":")[0], fully=fully)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
                end = "WRONG"
                wrong.setdefault(place_of(error), (seed, what[:160]))
                if asked.cases == 1:
                    traceback.print_exc()
            finally:
                signal.alarm(0)
            ends[end] += 1
            if not fully:
                slowest = sorted([*slowest, (time.perf_counter() - start, seed, what[:100])])[-3:]
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{asked.cases} files: " + ", ".join(f"{count} {end}" for end, count in ends.most_common()))
    print(f"slowest to read and show: {slowest}; most memory grew by {grown:.0f} MiB")
    for line, (seed, what) in wrong.items():
        print(f"seed {seed}: {line}\n    {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
