"""Settings that every test shares."""

import gc
import logging
import os
import signal
import sys
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.guards
from hypothesis import settings

pytest.register_assert_rewrite("support")

from support.command_line import MODELS  # noqa: E402 - assertions in it are to say what they compare
from support.examples import PROFILES  # noqa: E402
from support.quick_planning import exchanging_planning, full_planning, quick_planning  # noqa: E402

# The same examples on every machine and run: a failure can be repeated, and a slow machine fails nothing.
for name, count in PROFILES.items():
    settings.register_profile(name, derandomize=True, deadline=None, print_blob=True, max_examples=count)
settings.load_profile("quick")

SLOW_SECONDS = 600  # the time limit of a slow test; that of the others is in pyproject.toml

# With several threads on a busy machine, the first steps of plain eager training in a process do not always
# repeat themselves (1 of 24 processes; 0 of 30 with one thread), so nothing could be compared bit for bit.
torch.set_num_threads(1)

# A shell ignores interrupts for what it starts in the background, and what tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# pytest listens to loggers that do not propagate, for which torch prints every graph that it traces, and for
# which it flushes the caches to measure what guards take. Together some 7 % of these tests.
torch_traces = logging.getLogger("torch.__trace")
torch_traces.propagate = True
torch_traces.handlers.clear()
if hasattr(torch._dynamo.guards, "profile_guard_manager"):
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# A torch with CUDA, on a machine without a GPU, writes of it to the standard error where it profiles, which
# is compared where tests start a command.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    """Kernel figures are measured by these tests themselves, and leave the user's folder alone.

    Plans are not kept: a test is to see one made.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDREMAT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HYBRIDREMAT_CACHE_SIZE", "0")
        yield


@pytest.fixture(autouse=True, scope="module")
def _older_objects_are_not_searched():
    """Every measured step collects garbage, a second among the million objects of torch's compilers."""
    gc.collect()
    gc.freeze()


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Slow tests have more time; with all examples (``--hypothesis-profile=full``) property tests are."""
    if settings.get_current_profile_name() == "full":
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("slow")
    _leave_cases_to_the_slow_tests(items)
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("compat")
        if slow and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))


@pytest.fixture(autouse=True, scope="session")
def _no_lines_of_progress():
    """What a command prints is not to depend on how fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridremat.planning.progress.SOON", 1e6)
        yield


@pytest.fixture(autouse=True, scope="session")
def _little_effort():
    with quick_planning():
        yield


@pytest.fixture(autouse=True, scope="module")
def _effort_of_the_module(request):
    with _effort(request.node):
        yield


@pytest.fixture(autouse=True)
def _effort_of_the_test(request):
    with _effort(request.node):
        yield


def _effort(node):
    """Full effort where it is asked for, and for the figures of the compatibility table."""
    full = node.get_closest_marker("full_effort") or node.get_closest_marker("compat")
    if full or "HYBRIDREMAT_COMPAT_RESULTS" in os.environ:
        return full_planning()
    return exchanging_planning() if node.get_closest_marker("exchanges") else nullcontext()


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A file with functions that make models (:mod:`support.command_line`), in the current folder."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mymodels.py"
    sys.modules.pop("mymodels", None)
