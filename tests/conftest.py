"""Settings that every test shares."""

import pytest
from hypothesis import settings

# The same examples on every machine and run: a failure can be repeated, and a slow machine fails nothing.
settings.register_profile("repository", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repository")


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory):
    """Kernel figures are measured by these tests themselves, and leave the user's folder alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRIDREMAT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
