"""Settings that every test shares."""

from hypothesis import settings

# The same examples on every machine and run: a failure can be repeated, and a slow machine fails nothing.
settings.register_profile("repository", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repository")
