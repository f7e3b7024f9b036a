"""Moves written into two emitted graphs.

Behind what makes a value it is sent; before the execution that it has to be gone for, :func:`freed` waits and
is the last to read it. In the backward it is fetched, and its tensors are those that :func:`ready` makes. It
is saved no more: what the forward saves for all that moves is one ticket.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from hybridremat.compiler.deliveries import is_delivery
from hybridremat.compiler.offload.calls import begin, fetch, freed, hold, ready, send
from hybridremat.compiler.offload.stores import Stores
from hybridremat.errors import PlanError
from hybridremat.graph.generated_code import OP, PLACE
from hybridremat.graph.joint import Move, Schedule
from hybridremat.graph.private_torch import detect_fake_mode, run_and_save_rng_state
from hybridremat.graph.tracing.fx_nodes import is_wait, joint_outputs
from hybridremat.graph.tracing.trace import TracedStep

Pair = tuple[fx.GraphModule, fx.GraphModule]


def write_moves(step: TracedStep, graphs: Pair, schedule: Schedule, stores: Stores) -> None:
    """Write the moves of a schedule into the graphs that it was emitted as; ``stores``: where values wait.

    Raises
    ------
    PlanError
        If what moves is not saved there.
    """
    forward, backward = graphs
    moves = schedule.moves
    hold(stores, forward)
    saved = _Saved.of(step, graphs, schedule)
    ticket = _begin(forward, stores.number)
    _Forward(forward, saved).write(ticket, moves)
    arriving = _pass_ticket(step, graphs, ticket, saved.moved)
    _Backward(backward, saved).write(arriving, moves)
    for module in graphs:
        module.graph.lint()
        module.recompile()


@dataclass(frozen=True)
class _Saved:
    """What the forward saves of each value that moves, and what the backward takes of it.

    ``given[move]`` are the nodes of the forward, ``taken[move]`` those of the backward, ``owner[move]`` the
    one whose storage it is; ``moved``: the places among what is saved.
    """

    given: Mapping[int, Sequence[fx.Node]]
    taken: Mapping[int, Sequence[fx.Node]]
    owner: Mapping[int, fx.Node]
    moved: frozenset[int]

    @staticmethod
    def of(step: TracedStep, graphs: Pair, schedule: Schedule) -> _Saved:
        forward, backward = graphs
        number_of = {(move.value, move.birth): number for number, move in enumerate(schedule.moves)}
        born = _Places(forward).of
        saved = joint_outputs(forward)[step.num_outputs :]
        inputs = list(backward.graph.find_nodes(op="placeholder"))
        given, taken, owner = defaultdict(list), defaultdict(list), dict[int, fx.Node]()
        moved = set()
        for place, node in enumerate(saved):
            source = _owner(node) if isinstance(node, fx.Node) else None
            if source is None:
                continue
            call = source if OP in source.meta else source.all_input_nodes[0]
            number = number_of.get((_value(step, source), born[call]))
            if number is not None:
                given[number].append(node)
                taken[number].append(inputs[place])
                owner[number] = source
                moved.add(place)
        if missing := number_of.values() - given.keys():
            raise PlanError(f"{len(missing)} values that are to move are not saved; please report this")
        return _Saved(given, taken, owner, frozenset(moved))


class _Places:
    """The nodes of a graph by the place of their execution in the schedule."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._starts: dict[int, fx.Node] = {}
        self.of: dict[fx.Node, int] = {}
        for node in module.graph.nodes:
            if node.op == "call_function" and PLACE in node.meta:
                self._starts.setdefault(node.meta[PLACE], node)
                self.of[node] = node.meta[PLACE]
        (self._end,) = module.graph.find_nodes(op="output")

    def start(self, place: int) -> fx.Node:
        """The first node of an execution, or of the next one: what is dead has been dropped."""
        later = [each for each in self._starts if each >= place]
        return self._starts[min(later)] if later else self._end

    def start_of_views(self, place: int) -> fx.Node:
        """The first node that an execution needs: views that it reads are made right before it."""
        node = self.start(place)
        while (before := node.prev).op == "call_function" and before not in self.of and not _ends(before):
            node = before
        return node


def _ends(node: fx.Node) -> bool:
    """Whether a node belongs to the execution before it: a result, what waits for it, or hands it out."""
    return node.target is operator.getitem or is_wait(node) or is_delivery(node)


def _owner(node: fx.Node) -> fx.Node | None:
    """The node whose storage a saved one is a view of; None for an input or a state of the generator."""
    while node.op == "call_function" and OP not in node.meta:
        source = node.all_input_nodes[0]
        if source.target is run_and_save_rng_state:
            return None  # what it draws has an op
        if node.args[0] is source and OP in source.meta and isinstance(source.meta.get("val"), (tuple, list)):
            return node  # one of several results
        node = source
    return node if node.op == "call_function" else None


def _value(step: TracedStep, owner: fx.Node) -> int:
    """The value of the joint graph that a node is a version of."""
    if OP in owner.meta:
        joint = step.op_nodes[owner.meta[OP]]
    else:
        call = step.op_nodes[owner.all_input_nodes[0].meta[OP]]
        joint = next(user for user in call.users if user.args[1:] == owner.args[1:])
    (value,) = step.node_values[joint]
    return value


def _begin(forward: fx.GraphModule, number: int) -> fx.Node:
    inputs = list(forward.graph.find_nodes(op="placeholder"))
    with forward.graph.inserting_before(next(n for n in forward.graph.nodes if n.op != "placeholder")):
        ticket = forward.graph.call_function(begin, (number,))
    mode = detect_fake_mode([node.meta["val"] for node in inputs if "val" in node.meta])
    assert mode is not None
    with mode:
        ticket.meta["val"] = torch.empty(8, dtype=torch.uint8)
    return ticket


def _pass_ticket(step: TracedStep, graphs: Pair, ticket: fx.Node, moved: frozenset[int]) -> fx.Node:
    """Save the ticket in place of what moves; what arrives in the backward."""
    forward, backward = graphs
    (output,) = forward.graph.find_nodes(op="output")
    results = list(output.args[0])
    count = step.num_outputs
    kept = [node for place, node in enumerate(results[count:]) if place not in moved]
    output.args = ((*results[:count], ticket, *kept),)
    with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
        arriving = backward.graph.placeholder("offload_ticket")
    arriving.meta["val"] = ticket.meta["val"]
    return arriving


class _Forward:
    def __init__(self, module: fx.GraphModule, saved: _Saved) -> None:
        self.graph, self.saved, self.places = module.graph, saved, _Places(module)

    def write(self, ticket: fx.Node, moves: Sequence[Move]) -> None:
        order = {node: place for place, node in enumerate(self.graph.nodes)}
        by_birth = sorted(range(len(moves)), key=lambda number: (moves[number].birth, number))
        sent: dict[int, fx.Node] = {}
        for number in reversed(by_birth):  # each is put right behind what makes it
            owner = self.saved.owner[number]
            call = owner if OP in owner.meta else owner.all_input_nodes[0]
            # the call's tuple holds all its results until they have been taken out
            taken = [user for user in call.users if user.target is operator.getitem and call is not owner]
            made = [call, *taken]
            there = [*made, *(user for each in made for user in each.users if is_wait(user))]
            with self.graph.inserting_after(max(there, key=order.__getitem__)):
                sent[number] = self.graph.call_function(send, (ticket, number, owner))
        for number, move in enumerate(moves):
            with self.graph.inserting_before(self.places.start(move.free)):
                self.graph.call_function(freed, (sent[number], number, *self.saved.given[number]))


class _Backward:
    def __init__(self, module: fx.GraphModule, saved: _Saved) -> None:
        self.graph, self.saved, self.places = module.graph, saved, _Places(module)

    def write(self, ticket: fx.Node, moves: Sequence[Move]) -> None:
        for number, move in sorted(enumerate(moves), key=lambda each: each[1].ready):
            with self.graph.inserting_before(self.places.start_of_views(move.fetch)):
                fetched = self.graph.call_function(fetch, (ticket, number))
            for place, node in enumerate(self.saved.taken[number]):
                if node.users:
                    self._let_be_ready(node, fetched, place)
                self.graph.erase_node(node)

    def _make_late(self, node: fx.Node, fetched: fx.Node) -> None:
        """Put views that are made before the fetch right before what reads them: those of a replayed op."""
        order = {each: at for at, each in enumerate(self.graph.nodes)}
        for view in list(node.users):
            if order[view] < order[fetched] and view not in self.places.of and view.users:
                self._make_late(view, fetched)
                order = {each: at for at, each in enumerate(self.graph.nodes)}
                min(view.users, key=order.__getitem__).prepend(view)

    def _let_be_ready(self, node: fx.Node, fetched: fx.Node, place: int) -> None:
        self._make_late(node, fetched)
        order = {each: at for at, each in enumerate(self.graph.nodes)}
        first = min(node.users, key=order.__getitem__)
        if order[first] < order[fetched]:
            raise PlanError(f"{first.name} reads {node.name} before it is back; please report this")
        with self.graph.inserting_before(first):
            there = self.graph.call_function(ready, (fetched, place))
        there.meta = {key: item for key, item in node.meta.items() if key != OP}
        node.replace_all_uses_with(there)
