"""Exact memory of two emitted graphs, by the storages that are alive at each node.

Shares no code with :mod:`hybridremat.graph.memory`, which counts schedules: the two must agree. What is alive
when depends on no size (:func:`lifetimes_of`); how many bytes that is, may be asked at each of many sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from hybridremat.compiler.deliveries import is_delivery, refuse_unsafe_deliveries
from hybridremat.compiler.lifetimes import STATE, TANGENTS, GraphLifetimes, StepLifetimes
from hybridremat.compiler.lifetimes import EmittedMemory as EmittedMemory
from hybridremat.compiler.offload.calls import MOVING
from hybridremat.compiler.offload.check import moved_storages, values_away
from hybridremat.compiler.overwrites import refuse_unsafe_overwrites, written_over
from hybridremat.compiler.rng_replay import replay
from hybridremat.graph.private_torch import run_and_save_rng_state
from hybridremat.graph.tracing.fx_nodes import joint_outputs
from hybridremat.graph.tracing.trace import TracedStep


@dataclass
class _Storages:
    """Storages that nodes hold: for each node, joint value → storage number. ``holds[s]``: what it is.

    Joint nodes with equal terms (several outputs) count as the first of them: ``alike`` maps a value to that
    of the first.
    """

    step: TracedStep
    joint_node: dict[int, fx.Node]
    op_of: dict[fx.Node, int]
    alike: dict[int, int]
    holds: list[int] = field(default_factory=list)
    held: dict[fx.Node, dict[int, int]] = field(default_factory=dict)
    temporary: dict[fx.Node, int] = field(default_factory=dict)
    moved: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def new(self, what: int) -> int:
        self.holds.append(what)
        return len(self.holds) - 1

    def read(self, module: fx.GraphModule, terms: Mapping[fx.Node, int]) -> None:
        """Find what the nodes of a graph hold; its inputs may have been set."""
        for node in module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.held.setdefault(node, {})
            elif node.op != "output":
                self.add(node, terms[node])

    def of(self, nodes: Iterable[object]) -> set[int]:
        """The storages that any of the nodes holds."""
        return {s for node in nodes if isinstance(node, fx.Node) for s in self.held[node].values()}

    def add(self, node: fx.Node, term: int) -> None:
        """Find what a call node holds, and what it allocates while it runs."""
        if is_delivery(node):
            self.held[node] = {}
            place = next(p for p, number in enumerate(self.step.deliveries) if number == node.args[1])
            self.temporary[node] = 2 * len(self.step.graph.ops) + place
            return
        if node.target in MOVING:
            found = moved_storages(node, self.held)
            if found is None:
                move: Any = node.args[1]
                found = {value: self.new(value) for value in self.moved[move]}
            self.held[node] = dict(found)
            return
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source.target is run_and_save_rng_state:
            kept = self.held[source]
            self.held[node] = (
                {-1: kept[-1]} if node.args[1] == 0 else {v: s for v, s in kept.items() if v >= 0}
            )
            return
        joint = self.joint_node.get(term)
        op = self.op_of.get(joint) if joint is not None else None
        if op is None:
            inputs = {v: s for n in node.all_input_nodes for v, s in self.held[n].items()}
            wanted = self.values(joint) if joint is not None else inputs  # of what is unknown all
            self.held[node] = {v: inputs[v] for v in wanted if v in inputs}
            return
        traced = self.step.graph.ops[op]
        writes = [self.alike.get(v, v) for v in traced.writes]
        over = written_over(node)
        taken = list(self.held[over].values()) if over is not None else []
        new = [self.new(value) for value in writes[len(taken) :]]
        self.held[node] = dict(zip(writes, [*taken, *new], strict=True))
        self.temporary[node] = op + len(self.step.graph.ops) * (node.target is replay)
        if node.target is run_and_save_rng_state:
            self.held[node][-1] = self.new(STATE)

    def values(self, joint: fx.Node) -> list[int]:
        """The values of the first joint node with the same term."""
        return [self.alike.get(v, v) for v in self.step.node_values[joint]]


def _lifetimes(
    module: fx.GraphModule, storages: _Storages, start: set[int], stays: set[int]
) -> GraphLifetimes:
    """What is alive while a graph runs; ``start`` is alive at first, ``stays`` to the end."""
    last_use: dict[int, fx.Node] = {}
    for node in module.graph.nodes:
        for used in (node, *node.all_input_nodes):
            last_use.update(dict.fromkeys(storages.held.get(used, {}).values(), node))
    dying: dict[fx.Node, set[int]] = {}
    for storage, node in last_use.items():
        dying.setdefault(node, set()).add(storage)
    alive, calls = set(start), []
    for node in module.graph.nodes:
        new = set(storages.held.get(node, {}).values()) - alive
        alive |= new
        gone = (dying.get(node, set()) & alive) - stays
        alive -= gone
        takes = storages.temporary.get(node)
        if new or gone or takes is not None:
            calls.append((tuple(new), takes, tuple(gone)))
    return GraphLifetimes(tuple(start), tuple(calls))


def _storages(step: TracedStep, joint_terms: Mapping[fx.Node, int]) -> _Storages:
    """No storages yet; joint nodes with equal terms are alike."""
    first: dict[int, fx.Node] = {}
    alike: dict[int, int] = {}
    for joint, term in joint_terms.items():
        earlier = first.setdefault(term, joint)
        pairs = zip(step.node_values[joint], step.node_values[earlier], strict=False)
        alike |= {v: alike.get(w, w) for v, w in pairs if v != w}
    return _Storages(step, first, step.op_of, alike)


def _held_outputs(step: TracedStep, forward: fx.GraphModule, storages: _Storages) -> set[int]:
    """Storages of outputs that the caller holds to the end of the step."""
    count = step.num_outputs
    stay: set[int] = set()
    for joint, node in zip(joint_outputs(step.module)[:count], joint_outputs(forward)[:count], strict=True):
        if isinstance(node, fx.Node) and not step.graph.held_outputs.isdisjoint(step.node_values[joint]):
            held = storages.held[node]
            stay |= {held[v] for v in storages.values(joint) if v in held}
    return stay


def lifetimes_of(
    step: TracedStep,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    joint_terms: Mapping[fx.Node, int],
    forward_terms: Mapping[fx.Node, int],
    backward_terms: Mapping[fx.Node, int],
) -> StepLifetimes:
    """What both graphs hold when, whatever the bytes of values and workspaces.

    The terms are the checker's, which tell the joint node that a node computes. A node that draws and saves
    the generator's state has the term of what it draws.

    Raises
    ------
    PlanError
        If a call writes over what it must not, or reads what has been handed out.
    """
    storages = _storages(step, joint_terms)
    storages.read(forward, forward_terms)
    refuse_unsafe_overwrites(forward, storages.held)
    storages.moved = values_away(forward, storages.held)
    results = joint_outputs(forward)
    between = storages.of(results)
    first = _lifetimes(forward, storages, set(), between)

    inputs = list(backward.graph.find_nodes(op="placeholder"))
    for node, source in zip(inputs, results[step.num_outputs :], strict=False):
        storages.held[node] = storages.held[source]
    stays = {storages.new(TANGENTS), *_held_outputs(step, forward, storages)}
    storages.read(backward, backward_terms)
    over = refuse_unsafe_overwrites(
        backward, storages.held, storages.of(results[: step.num_outputs])
    )
    overwritten = tuple(place for place, node in enumerate(inputs) if storages.of([node]) & over)
    refuse_unsafe_deliveries(step, backward, storages.held, backward_terms, joint_terms)
    gradients = storages.of(joint_outputs(backward))
    second = _lifetimes(backward, storages, stays | storages.of(inputs), stays | gradients)
    return StepLifetimes(tuple(storages.holds), first, second, tuple(between), overwritten, storages.moved)
