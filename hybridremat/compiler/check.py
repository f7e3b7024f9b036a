"""The independent check of two emitted graphs against the joint graph. A plan that fails never runs.

Schedules are not used. Every node of the joint graph gets a *term*: its target, its constants
and the terms of its inputs; equal terms are equal numbers. A random node's term also holds which draw of
the step it is. The emitted graphs are read the same way, and must

- make every forward output, every gradient, every in-place update and every assert as the same term, updates
  and asserts once and in the forward only;
- draw random numbers in the joint graph's order, and otherwise only replay them;
- run each collective once, in the joint graph's order: so all ranks meet, whatever their plans are. Only
  gathers may run again, if the request leaves them to the plan: then all ranks have the same. To wait for
  one again does nothing;
- read no buffer after it has been overwritten (:mod:`hybridremat.compiler.buffer_hazards`);
- hand out early exactly the gradients that the joint graph says, once, and read neither these nor their
  parameters afterwards (:mod:`hybridremat.compiler.deliveries`);
- write over nothing that is not their own, or that is read again (:mod:`hybridremat.compiler.overwrites`);
- bring back what left for host memory, and read it in between nowhere (:mod:`hybridremat.compiler.offload`);
- stay under the limit, by the storages alive at each node (:mod:`hybridremat.compiler.emitted_memory`).

All but the bytes may be checked once for every size (:func:`proven`).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from hybridremat.compiler.buffer_hazards import check_error, refuse_late_reads, refuse_stale_reads
from hybridremat.compiler.deliveries import delivered_gradients, is_delivery
from hybridremat.compiler.emitted_memory import lifetimes_of
from hybridremat.compiler.lifetimes import EmittedMemory, StepLifetimes
from hybridremat.compiler.offload.calls import MOVING
from hybridremat.compiler.offload.check import Away
from hybridremat.compiler.rng_replay import replay
from hybridremat.graph.joint import Phase
from hybridremat.graph.private_torch import OpOverload, run_and_save_rng_state
from hybridremat.graph.rewrites import stands_for
from hybridremat.graph.rewrites.rewrite import Call
from hybridremat.graph.tracing.fx_nodes import (
    is_check,
    is_collective,
    is_mutation,
    is_random,
    is_wait,
    joint_outputs,
)
from hybridremat.graph.tracing.size_expressions import size_of
from hybridremat.graph.tracing.symbolic_calls import Symbol
from hybridremat.graph.tracing.trace import TracedStep

ATEN = torch.ops.aten
LOG_SOFTMAX_BACKWARD = ATEN._log_softmax_backward_data.default
RANDOM = torch.Tag.nondeterministic_seeded

Term = int
Key = tuple[Hashable, ...]


class _Terms:
    """Hash-consed terms, shared by the three graphs."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, Term] = {}

    def of(self, *key: Hashable) -> Term:
        return self._numbers.setdefault(key, len(self._numbers))


class _Reader:
    """Reads one graph in execution order and gives every node its term."""

    def __init__(self, terms: _Terms) -> None:
        self.terms = terms
        self.term: dict[fx.Node, Term] = {}
        self.drawn: list[Term] = []
        self.call_of: dict[Term, Key] = {}  # result of a draw -> the call that drew it
        self.state_of: dict[Term, Term] = {}  # generator state -> result of the draw that it precedes
        self.pairs: dict[fx.Node, Term] = {}  # run_and_save node -> result of its draw
        self.updates: Counter[Term] = Counter()
        self.collectives: list[Term] = []
        self.waited_for: set[Term] = set()
        self.away = Away()

    def read(self, node: fx.Node) -> None:
        if node.op == "get_attr":
            self.term[node] = self.terms.of("attribute", str(node.target))
        elif node.target is run_and_save_rng_state:
            target, *args = node.args
            self.pairs[node] = self._draw(self._drawn_call(target, args, node.kwargs))
            self.state_of[self.terms.of("state", self.pairs[node])] = self.pairs[node]
            self.term[node] = self.terms.of("pair", self.pairs[node])
        elif is_delivery(node):
            self.term[node] = self.terms.of("delivery", str(node.args[1]))
        elif node.target in MOVING:
            found = self.away.read(node, self.term)
            self.term[node] = found if isinstance(found, int) else self.terms.of(*found)
        elif node.target is replay:
            self.term[node] = self._replay(node)
        elif node.target is operator.getitem and node.args[0] in self.pairs:
            drawn = self.pairs[node.all_input_nodes[0]]
            self.term[node] = drawn if node.args[1] == 1 else self.terms.of("state", drawn)
        elif is_random(node):
            self.term[node] = self._draw(self._key(Call.of(node)))
        else:
            call = stands_for(Call.of(node))
            draws = call.target is not node.target and RANDOM in getattr(call.target, "tags", ())
            self.term[node] = self._draw(self._key(call)) if draws else self.terms.of(*self._key(call))
            if call.target is node.target and (is_mutation(node) or is_check(node)):
                self.updates[self.term[node]] += 1
            if is_wait(node):
                self.waited_for.update(self.term[source] for source in node.all_input_nodes)
            elif is_collective(node):
                self.collectives.append(self.term[node])

    def _drawn_call(self, target: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Key:
        """What a call draws that saves or reads the generator's state; ATen's stands for itself alone."""
        call = Call(target, tuple(args), kwargs)
        return self._key(call if isinstance(target, OpOverload) else stands_for(call))

    def _key(self, call: Call) -> Key:
        args = _counted_from_first(call.args) if call.target is LOG_SOFTMAX_BACKWARD else call.args
        return str(call.target), self._frozen(args), self._frozen(dict(call.kwargs))

    def _frozen(self, item: object) -> Hashable:
        if isinstance(item, fx.Node):
            return ("term", self.term[item])
        if isinstance(item, Call):
            return ("term", self.terms.of(*self._key(item)))
        if isinstance(item, (list, tuple)):
            return tuple(self._frozen(entry) for entry in item)
        if isinstance(item, dict):
            return tuple((name, self._frozen(entry)) for name, entry in sorted(item.items()))
        if isinstance(item, torch.SymInt):  # of a shape that a rewrite's term reads
            size = size_of(item)
            return ("Symbol", repr(size)) if not isinstance(size, int) else ("int", repr(size))
        if isinstance(item, Symbol):
            return ("Symbol", repr(item.of))
        return (type(item).__name__, repr(item))

    def _draw(self, call: Key) -> Term:
        result = self.terms.of("draw", len(self.drawn), call)
        self.drawn.append(result)
        self.call_of[result] = call
        return result

    def _replay(self, node: fx.Node) -> Term:
        state, target, *args = node.args
        assert isinstance(state, fx.Node)
        result = self.state_of.get(self.term[state])
        if result is None or self.call_of[result] != self._drawn_call(target, args, node.kwargs):
            raise check_error(f"{node.name} replays another random call than the one whose state it reads")
        return result

    def outputs(self, module: fx.GraphModule, start: int, end: int | None) -> list[Term | None]:
        """Terms of the module's outputs; None for outputs that are no tensors."""
        nodes = joint_outputs(module)[start:end]
        return [self.term[node] if isinstance(node, fx.Node) else None for node in nodes]


def _counted_from_first(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of the gradient of logits: dimension -1 is the same call as the last one's number."""
    arriving, probabilities, dim, dtype = args
    return arriving, probabilities, dim % max(1, probabilities.meta["val"].dim()), dtype


def _read_from_inputs(module: fx.GraphModule, reader: _Reader) -> _Reader:
    for node in module.graph.nodes:
        if node.op == "placeholder":
            reader.term[node] = reader.terms.of("input", node.name)
        elif node.op != "output":
            reader.read(node)
    return reader


def _read_backward(module: fx.GraphModule, forward: _Reader, saved: list[Term | None]) -> _Reader:
    reader = _Reader(forward.terms)
    reader.drawn, reader.call_of = list(forward.drawn), dict(forward.call_of)
    reader.state_of, reader.away = forward.state_of, forward.away
    inputs = list(module.graph.find_nodes(op="placeholder"))
    for node, term in zip(inputs, saved, strict=False):
        if term is None:
            raise check_error(f"{node.name} is saved but is no tensor")
        reader.term[node] = term
    for node in inputs[len(saved) :]:
        if not node.name.startswith("tangents_"):
            raise check_error(f"the backward takes {node.name}, which the forward does not save")
        reader.term[node] = reader.terms.of("input", node.name)
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            reader.read(node)
    return reader


def _check_updates(step: TracedStep, joint: _Reader, forward: _Reader, backward: _Reader) -> None:
    nodes = [step.op_nodes[op.id] for op in step.graph.ops if op.phase is Phase.BACKWARD]
    late = Counter(joint.term[node] for node in nodes if is_mutation(node) or is_check(node))
    if backward.updates - late:
        raise check_error("the backward repeats or makes an in-place update or an assert of the forward")
    if forward.updates != joint.updates - late or backward.updates != late:
        raise check_error("an in-place update or an assert is missing, repeated or different")


def _check_collectives(step: TracedStep, joint: _Reader, ran: list[Term]) -> None:
    again = {joint.term[node] for node in step.gathered_again}
    if [term for term in ran if term not in again] != [t for t in joint.collectives if t not in again]:
        raise check_error("collectives do not run once each, in the joint graph's order")


def _check_waits(joint: _Reader, emitted: _Reader) -> None:
    """Nothing runs between a collective and the waits for it: until then it holds what it was given."""
    started: set[fx.Node] = set()
    for node in (each for each in emitted.term if each.op == "call_function"):
        if is_wait(node):
            started.difference_update(node.all_input_nodes)
        elif node.target is not operator.getitem and started:
            raise check_error(f"{node.name} runs before a collective is waited for")
        if emitted.term[node] in joint.waited_for:
            started.add(node)
    if started:
        raise check_error("a collective is not waited for")


def _check_distinct_outputs(step: TracedStep, forward: fx.GraphModule) -> None:
    """Outputs with equal terms must be distinct tensors: the caller may change one in place."""
    joint_of: dict[fx.Node, fx.Node] = {}
    count = step.num_outputs
    for joint, node in zip(joint_outputs(step.module)[:count], joint_outputs(forward)[:count], strict=True):
        if isinstance(node, fx.Node) and joint_of.setdefault(node, joint) is not joint:
            raise check_error(f"{node.name} is returned as two outputs that are two in the joint graph")


def _check_gradients(step: TracedStep, joint: _Reader, backward: fx.GraphModule, second: _Reader) -> None:
    """Every gradient is returned or handed out, as the joint graph says, and computed as there."""
    given = second.outputs(backward, 0, None)
    expected = joint.outputs(step.module, step.num_outputs, None)
    delivered = delivered_gradients(backward)
    if delivered.keys() != step.deliveries.keys():
        raise check_error("other gradients are handed out early than planned")
    for index, gradient in delivered.items():
        if given[index] is not None:
            raise check_error(f"the gradient of input {index} is both handed out and returned")
        given[index] = second.term[gradient]
    if given != expected:
        raise check_error("a gradient is not computed as in the joint graph")


def check(
    step: TracedStep, forward: fx.GraphModule, backward: fx.GraphModule, *, limit: int | None = None
) -> EmittedMemory:
    """Check two emitted graphs against the joint graph of ``step`` and return their exact memory.

    Raises
    ------
    PlanError
        Naming the first rule that is broken, or the peak if it passes ``limit`` (bytes).
    """
    lifetimes = proven(step, forward, backward)
    memory = lifetimes.memory(step.graph)
    if limit is not None and memory.peak > limit:
        raise check_error(f"its peak of {memory.peak} bytes passes the limit of {limit} bytes")
    return memory


def proven(step: TracedStep, forward: fx.GraphModule, backward: fx.GraphModule) -> StepLifetimes:
    """Check all but the bytes of two emitted graphs, and return what they hold when.

    Of graphs whose sizes are symbols, as the joint graph's are, this holds at every size: equal terms have
    equal symbols.

    Raises
    ------
    PlanError
        Naming the first rule that is broken.
    """
    terms = _Terms()
    joint = _read_from_inputs(step.module, _Reader(terms))
    first = _read_from_inputs(forward, _Reader(terms))
    count = step.num_outputs
    if (whole := step.originals.whole) is not None:
        from hybridremat.compiler.chunked_losses import refuse_other_losses

        refuse_other_losses(whole, step.originals.exact or step.module)
    if (original := step.originals.exact) is not None:
        before = _read_from_inputs(original, _Reader(terms))
        if before.outputs(original, 0, None) != joint.outputs(step.module, 0, None):
            raise check_error("ops were made one that do not compute the same")
    second = _read_backward(backward, first, first.outputs(forward, count, None))
    _check_collectives(step, joint, first.collectives + second.collectives)
    _check_waits(joint, first)
    _check_waits(joint, second)
    if first.outputs(forward, 0, count) != joint.outputs(step.module, 0, count):
        raise check_error("a forward output is not computed as in the joint graph")
    _check_distinct_outputs(step, forward)
    _check_gradients(step, joint, backward, second)
    _check_updates(step, joint, first, second)
    if second.drawn != joint.drawn:
        raise check_error("random numbers are not drawn in the order of the joint graph")
    refuse_stale_reads(step, (forward, backward), joint.term, (first.term, second.term))
    refuse_late_reads(step, joint.term, backward, second.term)
    return lifetimes_of(
        step, forward, backward, joint.term, first.term | first.pairs, second.term | second.pairs
    )
