"""The arguments of a command, as the public functions take them."""

from __future__ import annotations

import ast
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from typing import Any

from hybridremat.analysis.sample_step import SampleStep
from hybridremat.cli.output import stdout_to_stderr
from hybridremat.cli.targets import load_target
from hybridremat.errors import PolicyError, TargetError, UsageError
from hybridremat.planning.settings import Settings
from hybridremat.plans.policy import Action, validated_policy


def load(options: Namespace, **changes: object) -> SampleStep:
    """Make the target of a command, with ``changes`` besides those of ``--set``.

    With ``--json`` the prints of the user's code go to the standard error.

    Raises
    ------
    TargetError
        If it cannot be made.
    """
    changes = {**parse_sets(options.sets), **changes}
    with stdout_to_stderr(active=options.json):
        return load_target(options.target, dropout=options.dropout, changes=changes)


def settings_given(options: Namespace, keywords: Collection[str]) -> dict[str, Any]:
    """Those of a function's ``keywords`` (names of settings) for which a command has an option."""
    readers: dict[str, Callable[[Any], object]] = {
        "memory_limit": limit_value,
        "max_overhead": overhead_value,
        "cache": lambda no_cache: not no_cache,
        "policy": policy_of_pins,
        "dynamic": dynamic_value,
    }
    found = {}
    for setting in fields(Settings):
        option = setting.metadata.get("option", setting.name)
        if setting.name in keywords and option in options:
            value = getattr(options, option)
            read = readers.get(setting.name)
            found[setting.name] = value if read is None else read(value)
    return found


def dynamic_value(text: str) -> bool | None:
    """The setting of ``--dynamic``.

    Raises
    ------
    UsageError
        If it is none.
    """
    known = {"auto": None, "true": True, "false": False}
    if text not in known:
        raise UsageError(f"--dynamic: {text!r} is not known; use auto, true or false")
    return known[text]


def sizes_given(texts: Sequence[str]) -> dict[str, Sequence[int]]:
    """The sizes of ``--sizes NAME=1,2,3`` and ``--sizes NAME=FROM:TO:STEP``, with TO.

    Raises
    ------
    UsageError
        If they cannot be read.
    """
    found: dict[str, Sequence[int]] = {}
    for text in texts:
        name, _, numbers = text.partition("=")
        parts = numbers.split(":") if ":" in numbers else numbers.split(",")
        if not all(part.strip().isdigit() for part in parts):
            raise UsageError(f"--sizes: {text!r} cannot be read; write length=64,128 or length=64:512:64")
        given = [int(part) for part in parts]
        several = ":" not in numbers
        if not several and (len(given) > 3 or given[2:] == [0]):
            raise UsageError(f"--sizes: {text!r} is no range; write length=FROM:TO:STEP")
        found[name] = given if several else range(given[0], given[1] + 1, *given[2:])
    return found


def policy_of_pins(pins: list[str] | None) -> dict[str, Action] | None:
    """The policy of ``--pin PATTERN=ACTION`` arguments; the last ``=`` separates the two.

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
    """A limit: digits alone as bytes; ``6GiB`` and ``50%`` stay text."""
    return int(text) if text and text.isdigit() else text


def overhead_value(text: str | None) -> float | str | None:
    """An overhead: ``0.1`` as a number; other text stays, for the error to quote."""
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def parse_sets(texts: Iterable[str]) -> dict[str, object]:
    """Keys and values of ``--set KEY=VALUE``: a value is a Python literal, or else text.

    Raises
    ------
    TargetError
        If there is no key, or it is given twice.
    """
    changes: dict[str, object] = {}
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
