"""What a command was given, as the public functions take it."""

from __future__ import annotations

from argparse import Namespace

from hybridremat.errors import PolicyError
from hybridremat.policy import Action, validated_policy
from hybridremat.set_options import parse_sets
from hybridremat.settings import AskedOfFrontier
from hybridremat.talking import results_apart
from hybridremat.targets import Target, load_target


def load(options: Namespace, **changes: object) -> Target:
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


def shared_settings(options: Namespace) -> AskedOfFrontier:
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
