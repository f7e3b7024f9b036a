"""Settings that every test shares."""

import os
import signal
import sys
from collections import defaultdict

import pytest
from hypothesis import Phase, settings

pytest.register_assert_rewrite("support")

from support import seconds  # noqa: E402
from support.command_line import MODELS  # noqa: E402 - assertions in it are to say what they compare
from support.examples import PROFILES  # noqa: E402
from support.long_tests import long_ids, unknown  # noqa: E402

if "HYBRIDREMAT_CORE" in os.environ:
    from support.without_torch import NoTorch

    sys.meta_path.insert(0, NoTorch())
else:
    from support.torch_session import *  # noqa: F403 - fixtures of every test

# The same examples on every machine and run: a failure can be repeated, and a slow machine fails nothing.
for name, count in PROFILES.items():
    settings.register_profile(name, derandomize=True, deadline=None, print_blob=True, max_examples=count)
settings.load_profile("quick")
# In `make faults`: that an example fails is enough, the smallest one takes minutes.
settings.register_profile("faults", phases=(Phase.explicit, Phase.generate))

TURN = os.environ.get("HYBRIDREMAT_TURN")
SLOW_SECONDS = 600  # the time limit of a slow test; that of the others is in pyproject.toml

# A shell ignores interrupts for what it starts in the background, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    """Kernel figures are measured by these tests themselves, and leave the user's folder alone.

    Plans are not kept: a test is to see one made.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDREMAT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HYBRIDREMAT_CACHE_SIZE", "0")
        yield


def _leave_cases_to_the_slow_tests(items):
    """Of a test with ``quick_cases(n)``, n cases spread over all of them stay quick."""
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick_cases") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for every in cases.values():
        (most,) = every[0].get_closest_marker("quick_cases").args
        kept = {number * len(every) // most for number in range(most)}
        for number, item in enumerate(every):
            if number not in kept:
                item.add_marker("slow")


def _name_the_long_tests(config, items):
    """Tests that CI leaves out are slow, too; ``-m "slow and not long"`` are the others."""
    ids, every = long_ids(), set()
    for item in items:
        names = {item.nodeid, item.nodeid.partition("[")[0]}
        every |= names
        if names & ids:
            item.add_marker("slow")
            item.add_marker("long")
    if not any("::" in each for each in config.args) and (missing := unknown(every)):
        raise pytest.UsageError(f"tests/support/long_tests.py names no tests: {sorted(missing)}")


def _leave_what_takes_seconds(config, items):
    """Tests that `make test` has no time for, unless they are to be in it all the same."""
    known, there = seconds.measured(), defaultdict(set)
    for item in items:
        path, _, name = item.nodeid.partition("::")
        there[path].add(name.partition("[")[0])
        long = seconds.takes_seconds(path, name, set(item.fixturenames), known)
        if long and not item.get_closest_marker("everyday"):
            item.add_marker("seconds")
    if not any("::" in each for each in config.args) and (missing := seconds.missing(known, there)):
        raise pytest.UsageError(f"tests/data/seconds.json (make test-times) names no tests: {missing}")


def _leave_what_waits_for_its_turn(config, items):
    """In CI (HYBRIDREMAT_TURN, a number that grows), heavy tests that another run has count as long."""
    known, there = seconds.measured(seconds.HEAVY), defaultdict(set)
    waiting = seconds.waiting(known, int(TURN)) if TURN else set()
    for item in items:
        path, _, name = item.nodeid.partition("::")
        there[path].add(name.partition("[")[0])
        own = seconds.of_fixture(path, set(item.fixturenames)) if TURN else None
        if item.nodeid in waiting if own is None else own % seconds.TURNS != int(TURN) % seconds.TURNS:
            item.add_marker("slow")
            item.add_marker("long")
    if not any("::" in each for each in config.args) and (missing := seconds.missing(known, there)):
        raise pytest.UsageError(f"tests/data/heavy.json (make test-slow-times) names no tests: {missing}")


def pytest_report_header():
    return f"of heavy tests, part {int(TURN) % seconds.TURNS + 1} of {seconds.TURNS}" if TURN else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Slow tests have more time; with all examples (``--hypothesis-profile=full``) property tests are."""
    _name_the_long_tests(config, items)
    if settings.get_current_profile_name() == "full":
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("slow")
                item.add_marker("long")
    _leave_cases_to_the_slow_tests(items)
    _leave_what_takes_seconds(config, items)
    _leave_what_waits_for_its_turn(config, items)
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("compat")
        if slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A file with functions that make models (:mod:`support.command_line`), in the current folder."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mymodels.py"
    sys.modules.pop("mymodels", None)
