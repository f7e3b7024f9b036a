"""Which tests `make test` leaves out because they take seconds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import seconds

ROOT = Path(__file__).parents[1]
REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_a" name="test_long[one case]" time="2.34" />
<testcase classname="tests.test_a" name="test_short" time="0.4" />
<testcase classname="tests.compat.test_b" name="test_short" time="0.1" />
</testsuite></testsuites>"""


def test_a_case_takes_seconds_if_it_is_known_to_or_a_fixture_of_its_file_does(monkeypatch):
    monkeypatch.setattr(seconds, "FIXTURES", {"tests/test_b.py": {"made"}})
    known = {"tests/test_a.py": {"test_long[one]": 3.0}}
    assert seconds.takes_seconds("tests/test_a.py", "test_long[one]", set(), known)
    assert not seconds.takes_seconds("tests/test_a.py", "test_long[two]", {"made"}, known)
    assert seconds.takes_seconds("tests/test_b.py", "test_short", {"made", "tmp_path"}, known)
    assert not seconds.takes_seconds("tests/test_b.py", "test_short", {"tmp_path"}, known)


def test_tests_that_are_gone_are_named():
    known = {"tests/test_a.py": {"test_one[x]": 3.0, "test_two": 2.0}, "tests/test_not_run.py": {"test": 2.0}}
    assert seconds.missing(known, {"tests/test_a.py": {"test_one"}}) == ["tests/test_a.py::test_two"]


def test_what_took_longer_is_written_and_files_that_did_not_run_are_kept(tmp_path):
    report, file = tmp_path / "tests.xml", tmp_path / "seconds.json"
    report.write_text(REPORT)
    before = {"tests/compat/test_b.py": {"test_short": 9.0}, "tests/test_c.py": {"test_other": 1.5}}
    file.write_text(json.dumps(before))
    subprocess.run([sys.executable, ROOT / "tools/test_times.py", report, file], check=True)
    assert json.loads(file.read_text()) == {
        "tests/test_a.py": {"test_long[one case]": 2.3},
        "tests/test_c.py": {"test_other": 1.5},
    }


@pytest.mark.parametrize(
    ("file", "bound"), [(seconds.FILE, seconds.MOST), (seconds.HEAVY, seconds.MOST_EACH_TIME)]
)
def test_what_is_written_down_is_in_order_and_above_the_bound(file, bound):
    known = seconds.measured(file)
    assert [*known] == sorted(known)
    assert min(time for times in known.values() for time in times.values()) >= bound


def test_heavy_tests_all_have_their_turn_and_neighbours_another_one():
    known = {f"tests/test_{file}.py": {f"test[{n}]": 9.0 for n in range(4)} for file in "abc"}
    ids = {f"{path}::{name}" for path, tests in known.items() for name in tests}
    runs = [ids - seconds.waiting(known, turn) for turn in range(490_000, 490_000 + seconds.TURNS)]
    assert set.union(*runs) == ids
    assert sum(map(len, runs)) == len(ids)
    assert all(len({each.partition("::")[0] for each in run}) == len(run) for run in runs)


def test_a_run_in_turn_leaves_out_what_waits():
    known = seconds.measured(seconds.HEAVY)
    first, second, *_ = (f"{path}::{name}" for path, tests in known.items() for name in tests)
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "--collect-only", "-m", "not long", first, second],
        cwd=ROOT,
        env={**os.environ, "HYBRIDREMAT_TURN": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert first in collected.stdout
    assert second not in collected.stdout


def test_all_that_use_a_heavy_fixture_have_one_turn_and_it_is_there():
    turns = [seconds.of_fixture(path, {fixture, "tmp_path"}) for path, fixture in seconds.HEAVY_FIXTURES]
    assert turns == [*range(len(seconds.HEAVY_FIXTURES))]
    assert seconds.of_fixture("tests/test_ranks.py", {"tmp_path"}) is None
    for path, fixture in seconds.HEAVY_FIXTURES:
        assert f"def {fixture}(tmp_path_factory)" in (ROOT / path).read_text(encoding="utf-8")
