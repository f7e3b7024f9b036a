"""What a command was given, as the public functions take it."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Iterable

from hybridremat.analysis.sample_step import SampleStep
from hybridremat.cli.output import results_apart
from hybridremat.cli.targets import load_target
from hybridremat.errors import PolicyError, TargetError
from hybridremat.planning.settings import FrontierSettings
from hybridremat.plans.policy import Action, validated_policy


def load(options: Namespace, **changes: object) -> SampleStep:
    """Make the target of a command, ``changes`` added to what ``--set`` says.

    With ``--json`` what the user's code prints goes to the standard error.

    Raises
    ------
    TargetError
        If it cannot be made.
    """
    changes = {**parse_sets(options.sets), **changes}
    with results_apart(active=options.json):
        return load_target(options.target, dropout=options.dropout, changes=changes)


def shared_settings(options: Namespace) -> FrontierSettings:
    """The settings behind the options that all planning commands share, but for the device."""
    return {
        "cost_model": options.cost_model,
        "workers": options.workers,
        "cache": not options.no_cache,
        "policy": pinned(options.pin),
    }


def pinned(pins: list[str] | None) -> dict[str, Action] | None:
    """``PATTERN=ACTION`` arguments as a policy; the last ``=`` divides.

    Raises
    ------
    PolicyError
        If one cannot be read, or two contradict each other.
    """
    if pins is None:
        return None
    policy: dict[str, Action] = {}
    for pin in pins:
        pattern, _, action = pin.rpartition("=")
        if policy.get(pattern, action) != action:
            raise PolicyError(f"--pin: {pattern!r} is pinned twice, to {policy[pattern]} and to {action}")
        policy |= validated_policy({pattern: action})
    return policy


def limit_value(text: str | None) -> int | str | None:
    """Bytes as a number; ``6GiB`` and ``50%`` stay text."""
    return int(text) if text and text.isdigit() else text


def overhead_value(text: str | None) -> float | str | None:
    """``0.1`` as a number; ``10%`` stays text, and so does what is no number, for the error to quote."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


Changes = dict[str, object]


def parse_sets(texts: Iterable[str]) -> Changes:
    """Keys and values of ``KEY=VALUE``; a value is a Python literal if it can be read as one, else text.

    Raises
    ------
    TargetError
        If there is no key, or it is given twice.
    """
    changes: Changes = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            raise TargetError(f"--set {text}: write KEY=VALUE, as in --set n_layer=24")
        if key in changes:
            raise TargetError(f"--set {key} is given twice, as {changes[key]!r} and as {value}")
        changes[key] = _literal(value)
    return changes


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
