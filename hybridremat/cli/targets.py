"""TARGET of the command line: a built-in model by name, or a user's function that makes one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from hybridremat.analysis.sample_step import RETURNS, SampleStep, sample_step
from hybridremat.errors import HybridRematError, TargetError
from hybridremat.zoo.models import REFERENCE_MODELS, has_dropout, reference_model


def load_target(
    text: str, *, dropout: float | None = None, changes: Mapping[str, object] | None = None
) -> SampleStep:
    """Make the model that ``text`` names: ``gpt2``, ``package.module:function`` or ``path/file.py:function``.

    Parameters
    ----------
    dropout
        The probability in a built-in model; for a function its argument of that name.
    changes
        Fields of a built-in model's config; for a function its keyword arguments.

    Raises
    ------
    TargetError
        If there is no such model, module or function, it does not take what is changed, it fails, or it
        returns something else.
    """
    if text in REFERENCE_MODELS:
        return _built_in(text, dropout, changes or {})
    function, folder = _function(text)
    given = {**({} if dropout is None else {"dropout": dropout}), **(changes or {})}
    _require_parameters(function, text, given)
    with _user_code(text, folder):
        made = function(**given)
    return sample_step(made, text)


def takes_argument(text: str, name: str) -> bool:
    """Whether a target can be given an argument; built-in models take all of theirs.

    Raises
    ------
    TargetError
        As :func:`load_target`.
    """
    if text in REFERENCE_MODELS:
        return True
    try:
        parameters = inspect.signature(_function(text)[0]).parameters
    except (TypeError, ValueError):
        return False  # it cannot be read
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _function(text: str) -> tuple[Callable[..., Any], Path]:
    """The function that a target names, and the folder of the user's code."""
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise TargetError(_unknown_target(text))
    folder = (Path(place).parent if place.endswith(".py") else Path.cwd()).resolve()
    function = getattr(_load_module(place, folder), name, None)
    if not callable(function):
        raise TargetError(f"{place} has no function {name!r}; it should {RETURNS}")
    return function, folder


def _built_in(name: str, dropout: float | None, changes: Mapping[str, object]) -> SampleStep:
    if dropout is not None and not 0 <= dropout < 1:
        raise TargetError(f"--dropout {dropout}: give a probability of at least 0 and below 1")
    if dropout and not has_dropout(name):
        raise TargetError(f"--dropout {dropout}: {name} has no dropout")
    model, batch = reference_model(name, dropout or 0.0, changes)
    return SampleStep(model, (), batch)


def _unknown_target(text: str) -> str:
    if text.endswith(".py"):
        return f"{text} is a file: name the function in it that makes the model ({text}:make)"
    close = get_close_matches(text, REFERENCE_MODELS, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return (
        f"{text!r} is no built-in model ({', '.join(REFERENCE_MODELS)}){hint} and does not name a function: "
        "give module:function or file.py:function"
    )


def _load_module(place: str, folder: Path) -> ModuleType:
    if not place.endswith(".py"):
        return _import_module(place, folder)
    path = Path(place)
    if not path.is_file():
        raise TargetError(f"there is no file {place}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses and pickle look it up
    sys.path.insert(0, str(folder))
    try:
        with _user_code(f"importing {place}", folder):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # as an import that failed leaves it
        raise
    return module


def _import_module(place: str, folder: Path) -> ModuleType:
    sys.path.insert(0, str(folder))
    with _user_code(f"importing {place}", folder):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise  # found, but something that it needs is missing
            missing = TargetError(f"there is no module {place!r} here or among the installed packages")
            raise missing from error


def _require_parameters(function: Callable[..., Any], text: str, given: Mapping[str, object]) -> None:
    """Refuse keyword arguments that the function does not take, and missing ones that it needs."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # it cannot be read: the call will say what is wrong
    named = {n: p for n, p in signature.parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes = ", ".join(named) or "no arguments"
    try:
        signature.bind(**given)
    except TypeError as error:
        unknown = [key for key in given if key not in named]
        lacking = [n for n, p in named.items() if p.default is p.empty and n not in given]
        if unknown:
            lacks = f"{text} should take an argument named {' and '.join(unknown)}"
            raise TargetError(f"{lacks}; it takes {takes}") from error
        if lacking:
            needs = " ".join(f"--set {name}=…" for name in lacking)
            raise TargetError(f"{text} needs {needs}; it takes {takes}") from error
        raise TargetError(f"{text}: {error}; it takes {takes}") from error


@contextmanager
def _user_code(what: str, folder: Path) -> Iterator[None]:
    """Turn what is raised inside into a TargetError that names file and line.

    Parameters
    ----------
    what
        The action, for the message: ``"importing train.py"``.
    folder
        The folder of the user's code, whose innermost line is named.

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
            f"{what} ended the program (exit status {error.code}) at {_location(error, folder)}: put what "
            'a script does below `if __name__ == "__main__":`'
        ) from error
    except Exception as error:
        kind = type(error).__name__
        text = f"{kind}: {error}" if str(error) else kind
        raise TargetError(f"{what} failed at {_location(error, folder)}: {text}{_advice(error)}") from error


def _location(error: BaseException, folder: Path) -> str:
    """``file:line`` of the innermost frame in the user's folder, or else of the innermost frame."""
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
