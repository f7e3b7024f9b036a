"""The versions that stand in keys and files, apart from the package's face: what writes them is below it."""

from functools import cache
from importlib.metadata import version

__version__ = "0.1.0"


@cache
def solver_version() -> str:
    """The release of OR-Tools that is installed; another one may find other schedules of equal cost."""
    return version("ortools")
