"""Write down which tests take seconds, or are heavy, from the times of a run.

    python tools/test_times.py TESTS.xml [--heavy] [FILE.json]

TESTS.xml is what ``pytest --junitxml=TESTS.xml -o junit_duration_report=call`` wrote (``make test-times``),
or, for heavy tests, pytest with fixtures in its times (``make test-slow-times``). Tests that take longer than
``MOST`` of ``tests/support/seconds.py`` go to ``tests/data/seconds.json``, those that take longer than
``MOST_EACH_TIME`` to ``heavy.json``; files that did not run keep what is known of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.seconds import FILE, HEAVY, MOST, MOST_EACH_TIME, measured  # noqa: E402


def times(report: Path) -> dict[str, dict[str, float]]:
    """Seconds of every test that ran, by its file and its name with its case."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        found[path][case.attrib["name"]] = float(case.attrib["time"])
    return found


def main() -> None:
    """Write the file anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", type=Path)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--heavy", action="store_true")
    asked = parser.parse_args()
    usual, most = (HEAVY, MOST_EACH_TIME) if asked.heavy else (FILE, MOST)
    file = asked.file or usual
    known = measured(file)
    for path, seconds in times(asked.tests).items():
        known[path] = {name: round(time, 1) for name, time in seconds.items() if time > most}
    there = {path: dict(sorted(known[path].items())) for path in sorted(known) if known[path]}
    text = json.dumps(there, indent=1, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")
    number = sum(map(len, there.values()))
    print(f"{number} tests of {len(there)} files take more than {most} s", file=sys.stderr)


if __name__ == "__main__":
    main()
