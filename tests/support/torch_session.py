"""What every test that uses torch shares: settings of its process, and fixtures (tests/conftest.py)."""

import gc
import logging
import os
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.guards

from support.quick_planning import exchanging_planning, full_planning, quick_planning

__all__ = [
    "effort_of_the_module",
    "effort_of_the_test",
    "little_effort",
    "no_lines_of_progress",
    "older_objects_are_not_searched",
]

# With several threads on a busy machine, the first steps of plain eager training in a process do not always
# repeat themselves (1 of 24 processes; 0 of 30 with one thread), so nothing could be compared bit for bit.
torch.set_num_threads(1)

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


@pytest.fixture(autouse=True, scope="module")
def older_objects_are_not_searched():
    """Every measured step collects garbage, a second among the million objects of torch's compilers."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def no_lines_of_progress():
    """What a command prints is not to depend on how fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridremat.planning.progress.SOON", 1e6)
        yield


@pytest.fixture(autouse=True, scope="session")
def little_effort():
    with quick_planning():
        yield


@pytest.fixture(autouse=True, scope="module")
def effort_of_the_module(request):
    with _effort(request.node):
        yield


@pytest.fixture(autouse=True)
def effort_of_the_test(request):
    with _effort(request.node):
        yield


def _effort(node):
    """Full effort where it is asked for, and for the figures of the compatibility table."""
    full = node.get_closest_marker("full_effort") or node.get_closest_marker("compat")
    if full or "HYBRIDREMAT_COMPAT_RESULTS" in os.environ:
        return full_planning()
    return exchanging_planning() if node.get_closest_marker("exchanges") else nullcontext()
