"""Settings that every test shares."""

import sys

import pytest
import torch
from hypothesis import settings

pytest.register_assert_rewrite("support")

from support.command_line import MODELS  # noqa: E402 - its assertions are to say what they compare

# The same examples on every machine and run: a failure can be repeated, and a slow machine fails nothing.
settings.register_profile("repository", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repository")

# With several threads on a busy machine, the first steps of plain eager training in a process do not always
# repeat themselves (1 of 24 processes; 0 of 30 with one thread), so nothing could be compared bit for bit.
torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    """Kernel figures are measured by these tests themselves, and leave the user's folder alone.

    Plans are not kept: a test is to see one made.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDREMAT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HYBRIDREMAT_CACHE_SIZE", "0")
        yield


@pytest.fixture
def models(tmp_path, monkeypatch):
    """A file with functions that make models (:mod:`support.command_line`), in the current folder."""
    (tmp_path / "mymodels.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "mymodels.py"
    sys.modules.pop("mymodels", None)
