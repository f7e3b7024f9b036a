"""Errors of the user's own code, told with their place instead of a traceback of ours."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridremat.errors import HybridRematError, TargetError


@contextmanager
def user_code(what: str, folder: Path) -> Iterator[None]:
    """Whatever is raised inside becomes a TargetError that names file and line.

    Parameters
    ----------
    what
        What was done, for the message: ``"importing train.py"``.
    folder
        Where the user's code lies: the innermost line there is named.

    Raises
    ------
    TargetError
    """
    try:
        yield
    except HybridRematError:
        raise
    except SyntaxError as error:
        place = f"{error.filename}:{error.lineno}"
        raise TargetError(f"{what} failed at {place}: {error.msg} ({type(error).__name__})") from error
    except SystemExit as error:
        raise TargetError(
            f"{what} ended the program (exit status {error.code}) at {_place(error, folder)}: put what "
            'a script does below `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        kind = type(error).__name__
        text = f"{kind}: {error}" if str(error) else kind
        raise TargetError(f"{what} failed at {_place(error, folder)}: {text}{_advice(error)}") from error


def _place(error: BaseException, folder: Path) -> str:
    """``file:line`` of the innermost frame in the user's folder; of the innermost one if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(folder)]
    here = Path(__file__).parent
    other = [frame for frame in frames if not Path(frame.filename).is_relative_to(here)]
    if not frames:
        return "an unknown place"
    frame = ([f for f in own if "site-packages" not in f.filename] or own or other or list(frames))[-1]
    return f"{frame.filename}:{frame.lineno}"


def _advice(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f". Install {error.name.partition('.')[0]} in this environment, or run where it is"
    return ""
