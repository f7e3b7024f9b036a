"""``policy=``: what to save or recompute, by module path and op, turned into pins."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from hybridremat.errors import PolicyError
from hybridremat.graph.joint import JointGraph, Op
from hybridremat.graph.pins import NO_PINS, Pins
from hybridremat.plans.patterns import Pattern, near_misses, needed_values, pinnable
from hybridremat.plans.records import PinRecord

Action = Literal["must_save", "must_recompute"]
Policy = Mapping[str, Action]

EXAMPLE = '{"transformer.h.*.mlp.act": "must_recompute", "transformer.h.*:addmm": "must_save"}'


@dataclass(frozen=True)
class Pinned:
    """A policy in one graph: its pins, and a record for each pattern, empty if it matches nothing."""

    pins: Pins = NO_PINS
    records: tuple[PinRecord, ...] = ()


def validated_policy(policy: object) -> dict[str, Action]:
    """A policy as a plain dict.

    Raises
    ------
    PolicyError
        If it is anything but a mapping of patterns to actions.
    """
    if not isinstance(policy, Mapping):
        raise PolicyError(f"policy={policy!r} is no mapping of patterns to actions; pass {EXAMPLE}")
    for pattern, action in policy.items():
        if not isinstance(pattern, str) or not all(pattern.split(":", 1)):
            raise PolicyError(
                f"policy: {pattern!r} is no pattern; write MODULE or MODULE:OP, both globs, as in {EXAMPLE}"
            )
        if action not in get_args(Action):
            raise PolicyError(f'policy: {pattern!r}: {action!r} is neither "must_save" nor "must_recompute"')
    return dict(policy)


def under_policy(graph: JointGraph, policy: Policy | None) -> JointGraph:
    """The graph, with a fingerprint that depends on the ops that a policy matches.

    Equal graphs may have other module names, so that a policy pins other ops.
    """
    if not policy:
        return graph
    matched = [
        (action, [op.id for op in pinnable(graph) if Pattern.of(text).matches(op)])
        for text, action in sorted(policy.items())
    ]
    fingerprint = hashlib.sha256((graph.fingerprint + repr(matched)).encode()).hexdigest()[:32]
    return replace(graph, fingerprint=fingerprint)


def resolve_policy(graph: JointGraph, policy: Policy | None) -> Pinned:
    """The ops and values that a policy pins in a graph.

    Of what must be recomputed only that counts which the backward can need: the counters of a normalization
    are outputs of the step that no op reads.

    Raises
    ------
    PolicyError
        If two patterns contradict each other, or a value that is to be recomputed cannot be.
    """
    if not policy:
        return Pinned()
    found = {text: _pinned_ops(graph, text, action) for text, action in policy.items()}
    by_action: dict[str, dict[int, str]] = {action: {} for action in get_args(Action)}
    for text, action in policy.items():
        by_action[action].update((op.id, text) for op in found[text])
    kept, remade = by_action["must_save"], by_action["must_recompute"]
    for op in sorted(kept.keys() & remade.keys()):
        raise PolicyError(
            f"policy: {kept[op]!r} says must_save and {remade[op]!r} must_recompute of one value, "
            f"{_name(graph, graph.ops[op])}. Narrow one of the two patterns."
        )
    for op, text in remade.items():
        _require_recomputable(graph, graph.ops[op], text)
    records = tuple(_record(graph, text, policy[text], found[text]) for text in policy)
    return Pinned(Pins(frozenset(kept), frozenset(remade)), records)


def require_matches(graphs: Sequence[JointGraph], policy: Policy | None) -> None:
    """Every pattern has to pin something in at least one graph of the step.

    Raises
    ------
    PolicyError
        For the first pattern that does not, with names that would match.
    """
    ops = [op for graph in graphs for op in pinnable(graph)]
    for text, action in (policy or {}).items():
        if not any(Pattern.of(text).matches(op) for op in ops):
            raise PolicyError(f"policy: {text!r} matches no op of the forward; {near_misses(text, ops)}.")
        if not any(_pinned_ops(graph, text, action) for graph in graphs):
            raise PolicyError(
                f"policy: {text!r} says {action}, but of what it matches the backward needs nothing: leave "
                "the pattern out."
            )


def _pinned_ops(graph: JointGraph, text: str, action: Action) -> list[Op]:
    pattern = Pattern.of(text)
    counting = needed_values(graph) if action == "must_recompute" else range(len(graph.values))
    return [op for op in pinnable(graph) if pattern.matches(op) and any(v in counting for v in op.writes)]


def total_records(records: Iterable[PinRecord]) -> tuple[PinRecord, ...]:
    """Records of several graphs added up by pattern."""
    total: dict[str, PinRecord] = {}
    for record in records:
        before = total.get(record.pattern, PinRecord(record.pattern, record.action, 0, 0))
        values, size = before.values + record.values, before.bytes + record.bytes
        total[record.pattern] = PinRecord(record.pattern, record.action, values, size)
    return tuple(total.values())


def _record(graph: JointGraph, text: str, action: Action, ops: list[Op]) -> PinRecord:
    values = [value for op in ops for value in op.writes]
    return PinRecord(text, action, len(values), sum(graph.values[value].bytes for value in values))


def _require_recomputable(graph: JointGraph, op: Op, text: str) -> None:
    why = _why_not(graph, op)
    if why:
        raise PolicyError(
            f"policy: {text!r} says must_recompute of {_name(graph, op)}, but {why}. Narrow the pattern so "
            "that it leaves this op out, or say must_save."
        )


def _why_not(graph: JointGraph, op: Op) -> str:
    """Why the op's values cannot be recomputed; empty if they can."""
    if not op.recomputable:
        return "this op must not run twice (an effect, a collective, or what it reads is overwritten)"
    if not needed_values(graph).isdisjoint((graph.held_outputs | graph.gradients).intersection(op.writes)):
        return "it is an output of the step (or crosses a graph break), which is held to the end in any case"
    return ""


def _name(graph: JointGraph, op: Op) -> str:
    where = f" in {op.module}" if op.module else ""
    value = graph.values[op.writes[0]]
    return f"{value.name or op.name} ({op.target}{where}{', ' + op.source if op.source else ''})"
