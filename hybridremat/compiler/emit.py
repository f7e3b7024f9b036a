"""From a schedule to the forward graph and the backward graph that PyTorch runs.

A new joint graph, with one node for each execution in schedule order, is cut into two by PyTorch's extractor.
Values are freed after their last use; an op that may overwrite one of them does so where nobody needs it any
more (:meth:`~hybridremat.graph.memory.MemorySimulator.overwritten`). Gradients that leave early are handed to
:func:`~hybridremat.compiler.early_gradients.deliver` in place of being returned. A random op that runs more
than once saves the generator's state the first time and replays it afterwards.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any, Final

import torch
from torch import fx

from hybridremat.compiler.early_gradients import deliver
from hybridremat.compiler.rng_replay import replay
from hybridremat.errors import PlanError
from hybridremat.graph.generated_code import OP, PLACE
from hybridremat.graph.joint import Phase, Schedule
from hybridremat.graph.memory import MemorySimulator
from hybridremat.graph.private_torch import (
    OpOverload,
    _extract_fwd_bwd_modules,
    _make_graph_module,
    detect_fake_mode,
    run_and_save_rng_state,
)
from hybridremat.graph.rewrites import form_of
from hybridremat.graph.rewrites.part_kernels import DRAWING
from hybridremat.graph.rewrites.rewrite import Form
from hybridremat.graph.tracing.fx_nodes import (
    is_check,
    is_mutation,
    is_random,
    is_wait,
    joint_outputs,
    tensors,
)
from hybridremat.graph.tracing.symbolic import JOINT, ORIGIN
from hybridremat.graph.tracing.trace import TracedStep

UNWATCHED: Final = "saved_tensor_with_no_vc_check"
"""PyTorch's name, in a node's ``meta``: it is saved, and may change before the backward."""

_LEAVING = "hybridremat_leaving"  # a node's ``meta``: the inputs whose gradients leave right after it
_IN_PLACE = "hybridremat_in_place"  # a node's ``meta``: its form in place, and over which input


class _Writer:
    """Writes executions into a new joint graph.

    ``current`` maps a node of the old graph to its latest version in the new one, ``first`` to the version of
    the forward. Views are written where they are first read. Nodes that the compiler inlines are written anew
    for each run of kernels that it may fuse, so that it never keeps one from one run to another.
    """

    def __init__(self, step: TracedStep, runs: Counter[int]) -> None:
        self.step, self.runs = step, runs
        self.graph = fx.Graph()
        self.current: dict[fx.Node, fx.Node] = {}
        self.first: dict[fx.Node, fx.Node] = {}
        self.views: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.inlined: dict[tuple[fx.Node, tuple[fx.Node, ...]], fx.Node] = {}
        self.fused = step.fused_ops
        self.last: tuple[bool, bool] = (True, False)  # the last execution: forward, a kernel of the compiler
        self.states: dict[int, fx.Node] = {}
        self.forward_nodes: set[fx.Node] = set()
        self.items: dict[fx.Node, list[fx.Node]] = {}
        calls = set(step.op_nodes)
        for node in step.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.current[node] = self.graph.node_copy(node, lambda source: self.current[source])
            elif node.target is operator.getitem and node.args[0] in calls:
                self.items.setdefault(node.args[0], []).append(node)
        self.first.update(self.current)

    def resolve(self, node: fx.Node, versions: dict[fx.Node, fx.Node]) -> fx.Node:
        """The new node for ``node``, given the versions of calls; emits views as needed."""
        if node in versions:
            return versions[node]
        sources = tuple(self.resolve(source, versions) for source in node.all_input_nodes)
        key = (node, sources)
        written = self.inlined if node in self.step.fusion.inlined else self.views
        if key not in written:
            mapping = dict(zip(node.all_input_nodes, sources, strict=True))
            written[key] = self.graph.node_copy(node, lambda source: mapping[source])
        return written[key]

    def execute(self, op: int, *, place: int, forward: bool, over: int | None) -> None:
        """Write the execution at a place, of an op that writes its result over the value ``over``, if any."""
        node = self.step.op_nodes[op]
        now = forward, op in self.fused
        if now != self.last or not now[1]:
            self.inlined = {}
        self.last = now
        mapping = {source: self.resolve(source, self.current) for source in node.all_input_nodes}
        form, source = self._form(op, over)
        target: Any = node.target
        kwargs: Any = fx.map_arg(node.kwargs, mapping.__getitem__)
        given = None if source is None else mapping[source]
        argument = None  # of an ATen op: which it is to write over (see _write_in_place)
        if given is not None and isinstance(form.target, OpOverload):
            argument = list(mapping.values()).index(given)
        else:
            target, kwargs = form.target, form.keywords(kwargs, given)
        if is_random(node) and self.runs[op] > 1:
            call = self._random_call(op, node, target, kwargs, mapping, place)
        else:
            args: Any = fx.map_arg(node.args, mapping.__getitem__)
            call = self.graph.create_node("call_function", target, args, kwargs, node.name)
        call.meta = {key: item for key, item in node.meta.items() if key != "recompute"}
        call.meta |= {OP: op, PLACE: place}
        if argument is not None:
            call.meta[_IN_PLACE] = form, argument
        written = {node: call}
        for item in self.items.get(node, ()):
            copy = self.graph.create_node("call_function", operator.getitem, (call, item.args[1]))
            copy.meta = dict(item.meta)
            written[item] = copy
        self.current.update(written)
        if forward:
            self.forward_nodes.update(written.values())
            for old, new in written.items():
                self.first.setdefault(old, new)
        self._wait_for(node)

    def _wait_for(self, node: fx.Node) -> None:
        """Wait for a collective right after it: until then PyTorch holds what it was given."""
        for made in (node, *self.items.get(node, ())):
            for user in filter(is_wait, made.users):
                self.resolve(user, self.current)

    def deliver(self, op: int, index: int, gradient: fx.Node) -> None:
        """Mark that a gradient leaves after the latest execution of an op; what it is a view of is there."""
        self.resolve(gradient, self.current)
        self.current[self.step.op_nodes[op]].meta.setdefault(_LEAVING, []).append(index)

    def _form(self, op: int, over: int | None) -> tuple[Form, fx.Node | None]:
        """What runs an op, and what of its node's inputs it writes over."""
        kernel, node = self.step.graph.ops[op].runs.kernel, self.step.op_nodes[op]
        found = form_of(self.step, op, over)
        if found is None and kernel:
            raise PlanError(f"the plan runs {node.name} in a way that is not known; make it again")
        if found is None and over is not None:
            raise PlanError(f"the plan lets {node.name} overwrite what it cannot; make it again")
        return found or (Form(node.target, ""), None)

    def _random_call(
        self,
        op: int,
        node: fx.Node,
        target: Any,
        kwargs: dict[str, Any],
        mapping: dict[fx.Node, fx.Node],
        place: int,
    ) -> fx.Node:
        args: Any = fx.map_arg(node.args, mapping.__getitem__)
        target = DRAWING.get(target, target)
        if op in self.states:
            return self.graph.create_node("call_function", replay, (self.states[op], target, *args), kwargs)
        pair = self.graph.create_node("call_function", run_and_save_rng_state, (target, *args), kwargs)
        state = self.graph.create_node("call_function", operator.getitem, (pair, 0))
        state.meta["val"] = self._fake_state()
        pair.meta[PLACE] = place
        pair.meta["val"] = (state.meta["val"], node.meta["val"])
        pair.meta |= {key: node.meta[key] for key in (ORIGIN, JOINT) if key in node.meta}
        self.states[op] = state
        self.forward_nodes.add(state)
        return self.graph.create_node("call_function", operator.getitem, (pair, 1))

    def _fake_state(self) -> torch.Tensor:
        fake = [n.meta["val"] for n in self.graph.nodes if n.op == "placeholder" and "val" in n.meta]
        mode = detect_fake_mode(fake)
        assert mode is not None
        with mode:
            return torch.empty(self.step.graph.rng_state_bytes, dtype=torch.uint8)

    def finish(self) -> fx.GraphModule:
        """Write the outputs and return the module."""
        results: list[Any] = []
        for index, output in enumerate(joint_outputs(self.step.module)):
            if isinstance(output, fx.Node):
                versions = self.first if index < self.step.num_outputs else self.current
                results.append(self.resolve(output, versions))
            else:
                results.append(output)
        written = self.graph.output(tuple(results))
        old = next(iter(self.step.module.graph.find_nodes(op="output")))
        written.meta = dict(old.meta)
        return _make_graph_module(self.step.module, self.graph)

    def saved_nodes(self, backward_roots: list[fx.Node], *, views: bool) -> list[fx.Node]:
        """Forward nodes and inputs that the backward reads, in graph order.

        It makes views again; with ``views`` only those that the forward does not read, or whose source is
        saved, too.
        """
        found: set[fx.Node] = set()
        seen: set[fx.Node] = set()
        stack = list(backward_roots)
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self.forward_nodes and not tensors(node.meta.get("val")):  # a number is read again
                stack.extend(each for each in node.all_input_nodes if each not in self.forward_nodes)
            elif node in self.forward_nodes or _is_primal(node) or (views and self._is_read_view(node)):
                found.add(node)
            else:
                stack.extend(node.all_input_nodes)
        again = {node for node in found - self.forward_nodes if found.intersection(node.all_input_nodes[:1])}
        return [node for node in self.graph.nodes if node in found - again]

    def _is_read_view(self, node: fx.Node) -> bool:
        """Whether a node is a view of what the forward computes, and read there."""
        if not any(user in self.forward_nodes for user in node.users):
            return False
        while node.op == "call_function" and node not in self.forward_nodes and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node in self.forward_nodes


def emit(
    step: TracedStep, schedule: Schedule, *, save_views: bool = True
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward GraphModule that execute ``schedule``.

    They follow AOTAutograd's contract for a partition function: the forward returns its outputs, then
    the saved tensors; the backward takes the saved tensors, then the tangents. With ``save_views`` views that
    the forward makes are saved in place of what they are views of, where only they are read; a compiler makes
    them anew at no cost.

    Raises
    ------
    PlanError
        If an op of the graph may overwrite what it cannot.
    """
    writer = _Writer(step, Counter(schedule.steps))
    simulate = MemorySimulator(step.graph)
    overwritten, departures = simulate.overwritten(schedule), simulate.departures(schedule)
    results = joint_outputs(step.module)[step.num_outputs :]
    input_of = {each: number for number, each in step.deliveries.items()}
    backward_calls: list[fx.Node] = []
    for position, op in enumerate(schedule.steps):
        forward = position < schedule.num_forward
        writer.execute(op, place=position, forward=forward, over=overwritten.get(position))
        if not forward:
            backward_calls.append(writer.current[step.op_nodes[op]])
        for each in departures.get(position, ()):
            writer.deliver(op, input_of[each], results[input_of[each]])
    joint = writer.finish()
    outputs = joint_outputs(joint)
    gradients = [node for node in outputs[step.num_outputs :] if isinstance(node, fx.Node)]
    saved = writer.saved_nodes(backward_calls + gradients, views=save_views)
    _exempt_overwritten([node for node in joint.graph.find_nodes(op="placeholder") if _is_primal(node)])
    forward_module, backward_module = _extract_fwd_bwd_modules(
        joint, saved, saved_sym_nodes=[], num_fwd_outputs=step.num_outputs
    )
    _drop_dead(step, forward_module, forward=True)
    _drop_dead(step, backward_module, forward=False)
    for module in (forward_module, backward_module):
        _write_in_place(module)
    _let_leave(backward_module, step)
    return forward_module, backward_module


def _is_primal(node: fx.Node) -> bool:
    return node.op == "placeholder" and not node.name.startswith("tangents_")


def _exempt_overwritten(primals: list[fx.Node]) -> None:
    """Save inputs that the step overwrites without autograd's version check.

    Only running statistics of normalizations in training mode are read after their update, and no result
    depends on them (the checker ensures it); a second forward may update them before the backward.
    """
    for node in primals:
        if any(is_mutation(user) and user.args[0] is node for user in node.users):
            node.meta[UNWATCHED] = True


def unwatched(forward: fx.GraphModule, num_outputs: int) -> tuple[int, ...]:
    """The places among a forward's results of what it saves that may change before the backward."""
    saved = list(enumerate(joint_outputs(forward)))[num_outputs:]
    return tuple(n for n, node in saved if isinstance(node, fx.Node) and node.meta.get(UNWATCHED))


def _drop_dead(step: TracedStep, module: fx.GraphModule, *, forward: bool) -> None:
    """Remove dead nodes, from the backward random ones and checks of the forward too: fx would keep them."""

    def must_stay(node: fx.Node) -> bool:
        if node.op in ("placeholder", "output") or is_mutation(node):
            return True
        if is_check(node):
            return forward is (step.graph.ops[node.meta[OP]].phase is not Phase.BACKWARD)
        draws = is_random(node) or node.target in DRAWING or node.target is run_and_save_rng_state
        return forward and draws

    module.graph.eliminate_dead_code(is_impure_node=must_stay)
    module.recompile()


def _write_in_place(module: fx.GraphModule) -> None:
    """Give the calls that are to write over an input their forms that do so.

    Not before: PyTorch's extractor and the removal of dead code take such calls for updates.
    """
    for node in module.graph.nodes:
        if node.op == "call_function" and _IN_PLACE in node.meta:  # of what is saved, inputs have it too
            form, place = node.meta[_IN_PLACE]
            node.target, node.kwargs = form.target, form.keywords(node.kwargs, node.all_input_nodes[place])
    module.recompile()


def _let_leave(module: fx.GraphModule, step: TracedStep) -> None:
    """Deliver gradients in the backward in place of returning them."""
    (output,) = module.graph.find_nodes(op="output")
    results = list(output.args[0])
    left: list[int] = []
    order = {node: place for place, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        # the last one first: each is put right behind the call, before those that follow it
        for index in reversed(node.meta.get(_LEAVING, ())) if node.op == "call_function" else ():
            gradient = results[index]
            # the call's tuple holds all its results until they have been taken out
            taken = [user for user in node.users if user.target is operator.getitem]
            with module.graph.inserting_after(max(node, gradient, *taken, key=order.__getitem__)):
                order[module.graph.call_function(deliver, (gradient, index))] = len(order)
            results[index] = None
            left.append(index)
    if sorted(left) != [*step.deliveries]:
        raise PlanError("a gradient does not leave where it is planned to; please report this")
    output.args = (tuple(results),)
    module.recompile()
