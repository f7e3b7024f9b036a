"""Try on the device whether a kernel can be run by parts: with the same bits, and with less workspace.

As for ops in place (:mod:`hybridremat.graph.costs.in_place_trials`), the same bits on random numbers of these
shapes, strides and types are strong evidence, not a proof. Of random ops the generator has to be left in the
same state, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from hybridremat.graph.costs.allocations import record
from hybridremat.graph.costs.in_place_trials import bits_of, random_inputs
from hybridremat.graph.costs.kernel_benchmarks import is_out_of_memory, memory_errors
from hybridremat.graph.costs.kernel_clocks import clock_for
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import Kernels, distinct_kernels
from hybridremat.graph.costs.recorder import Mark, Segment
from hybridremat.graph.joint import Op, Variant
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.tracing.by_parts import KERNELS, PartedKernel, parted_kernels
from hybridremat.graph.tracing.in_place import laid_out_alike
from hybridremat.graph.tracing.signature import distinct_arguments
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)

WORTH = 0.95  # of what a kernel takes with its result: parts that take more than this are left out

ENOUGH = 0.7  # of the same: where parts take no more than this, no further way is tried

_Result = tuple[list[Any], torch.Tensor]
"""What a call returns, and the state of the generator after it."""


@dataclass(frozen=True)
class _Form:
    """A way to run a kernel by parts, and the names under which trials of it are kept.

    ``over``: by name of the trial, the value that it may write its first result over, and the input.
    """

    name: str
    kernel: PartedKernel
    parts: int
    over: Mapping[str, tuple[int, fx.Node]]


def with_parts(step: TracedStep, store: KernelStore) -> TracedStep:
    """The same step with the ways to run each op by parts that pay, tried where the store does not know.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    kernels = distinct_kernels(step)
    if kernels.device == "meta":
        return step
    forms = {op.id: _forms(step, op, kernels.key_of[op.id]) for op in step.graph.ops if op.recomputable}
    for _ in range(max(map(len, forms.values()), default=0)):
        wanted = {op: _wanted(step, step.graph.ops[op], found, store) for op, found in forms.items()}
        if missing := list(_missing(step, wanted, store)):
            store.add_part_workspaces(_tried(missing, kernels.device))
    ops = tuple(_with_variant(step, op, forms.get(op.id, ()), store) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _forms(step: TracedStep, op: Op, key: str) -> list[_Form]:
    """The ways to run an op by parts that may pay, as far as its sizes tell."""
    node = step.op_nodes[op.id]
    if not key:
        return []
    takes, written = _own_bytes(step, op)
    alike = list(laid_out_alike(step, op.id, node.all_input_nodes))
    forms = []
    for kernel, parts in parted_kernels(node):
        name = f"{key} of {distinct_arguments(node)} by {parts} {kernel.run.__name__}"
        places = {f"{name} over {node.all_input_nodes.index(each[1])}": each for each in alike}
        over = places if kernel.exact else {}
        if over or written < WORTH * takes:  # at best a form takes no workspace
            forms.append(_Form(name, kernel, parts, over))
    return forms


def _wanted(step: TracedStep, op: Op, forms: Sequence[_Form], store: KernelStore) -> Sequence[_Form]:
    """The first form; the next one, too, where that has the same bits and does not save enough.

    A later form does by parts what those before it do, and more: it has other bits if they have.
    """
    takes, written = _own_bytes(step, op)
    for count, form in enumerate(forms, 1):
        workspace = store.part_workspace(form.name)
        if workspace is None or workspace < 0:
            return forms[:count]
        if _bytes_by_parts(_variant(op, form, store), written) <= ENOUGH * takes:
            return forms[:count]
    return forms


def _own_bytes(step: TracedStep, op: Op) -> tuple[int, int]:
    """What an op's own kernel takes with its results, if it writes them over nothing, and these alone."""
    written = sum(step.graph.values[value].bytes for value in op.writes)
    return op.temp + written * (not op.overwrites), written


def _missing(step: TracedStep, forms: Mapping[int, Sequence[_Form]], store: KernelStore) -> Iterator[_Trial]:
    """What the store does not tell about the forms of ops.

    Of two ops with the same kernel one may write over an input that the other may not.
    """
    seen: set[str] = set()
    for op, found in forms.items():
        unknown = []
        for form in found:
            names = {name for name in _needed(form, store) if store.part_workspace(name) is None}
            if not names <= seen:
                unknown.append(form)
                seen |= names
        if unknown:
            yield _Trial(step.op_nodes[op], tuple(unknown))


def _needed(form: _Form, store: KernelStore) -> Iterator[str]:
    """The names of the trials that tell about a form: one that has other bits is tried over nothing."""
    yield form.name
    known = store.part_workspace(form.name)
    if known is None or known >= 0:
        yield from form.over


def _with_variant(step: TracedStep, op: Op, forms: Sequence[_Form], store: KernelStore) -> Op:
    """The op with the form that takes least, if it pays."""
    wanted = _wanted(step, op, forms, store)
    same = [form for form in wanted if store.part_workspace(form.name) not in (None, -1)]
    if not same:
        return op
    own = Variant("", 1, op.time, op.temp, op.overwrites)
    variants = (_variant(op, form, store) for form in same)
    best = min(variants, key=lambda each: (each.temp, not each.overwrites))
    takes, written = _own_bytes(step, op)
    return replace(op, variants=(own, best)) if _bytes_by_parts(best, written) < WORTH * takes else op


def _variant(op: Op, form: _Form, store: KernelStore) -> Variant:
    """A form that has the same bits, with what it may write over at no more workspace."""
    workspace = store.part_workspace(form.name)
    assert workspace is not None and workspace >= 0
    tried = ((value, store.part_workspace(name)) for name, (value, _) in form.over.items())
    over = tuple(value for value, takes in tried if takes is not None and 0 <= takes <= workspace)
    return Variant(form.kernel.run.__name__, form.parts, op.time, workspace, over)


def _bytes_by_parts(variant: Variant, written: int) -> int:
    """What a form takes with its results."""
    return variant.temp + written * (not variant.overwrites)


def with_part_times(step: TracedStep, store: KernelStore) -> TracedStep:
    """The same step with what the ways by parts take: the op's own time, as they compare when timed in turn.

    Raises
    ------
    MeasurementError
        If no memory is left to time a kernel.
    """
    kernels = distinct_kernels(step)
    ops = tuple(_part_timed(step.op_nodes[op.id], op, kernels, store) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _part_timed(node: fx.Node, op: Op, kernels: Kernels, store: KernelStore) -> Op:
    if not op.variants:
        return op
    own, parts = op.variants
    name = f"{kernels.key_of[op.id]} of {distinct_arguments(node)} by {parts.parts} {parts.kernel}"
    if (percent := store.time(name)) is None:
        percent = _percent(node, parts, kernels.device)
        store.add_times({name: percent})
    alone = store.time(kernels.key_of[op.id]) or own.time
    timed = replace(parts, time=own.time + max(0, alone * (percent - 100) // 100))
    return replace(op, variants=(own, timed))


def _percent(node: fx.Node, parts: Variant, device: str) -> int:
    """The least time of a kernel by parts as a percentage of the op's own, timed one after the other."""
    clock = clock_for(device)
    with outside_tracing(), memory_errors():
        inputs = _Inputs(node)  # real ones: a step is planned in the middle of its trace
        own = clock.least(inputs.plain())
        by_parts = clock.least(inputs.by_parts(KERNELS[parts.kernel], parts.parts))
    percent: int = max(1, 100 * by_parts // max(1, own))
    return percent


@dataclass(frozen=True)
class _Trial:
    """Forms to be tried on the inputs of a node."""

    node: fx.Node
    forms: tuple[_Form, ...]


class _Inputs:
    """Random numbers for a node, and the calls on them."""

    def __init__(self, node: fx.Node) -> None:
        assert callable(node.target)
        self._target, self._args = node.target, node.args
        self._given = random_inputs(node)

    def plain(self) -> Callable[[], Any]:
        """The node's own call."""
        args: Any = fx.map_arg(self._args, self._given.__getitem__)
        return partial(self._target, *args)

    def by_parts(self, kernel: PartedKernel, parts: int, over: fx.Node | None = None) -> Callable[[], Any]:
        """The call by parts, which may write over a copy of one of the inputs."""
        given = self._given if over is None else {**self._given, over: self._given[over].clone()}
        args: Any = fx.map_arg(self._args, given.__getitem__)
        return partial(kernel.run, *args, parts=parts, over=None if over is None else given[over])


def _tried(trials: Sequence[_Trial], device: str) -> dict[str, int]:
    """By name the bytes that each form takes beyond its results; −1 if its bits are not the plain ones."""
    same: dict[str, bool] = {}

    def run(mark: Mark) -> None:
        for trial in trials:
            same.update(_compared(trial, device, mark))

    with outside_tracing(), memory_errors():
        segments = record(device, run).named()
    return {name: _workspace(segments[name]) if passed else -1 for name, passed in same.items()}


def _workspace(segment: Segment) -> int:
    peak, left = segment.above_start
    return peak - left


def _compared(trial: _Trial, device: str, mark: Mark) -> Iterator[tuple[str, bool]]:
    """Whether each call of each form leaves what the plain one does; every call is a segment of its name."""
    inputs = expected = None
    with _refusals(trial):
        inputs = _Inputs(trial.node)
        if any(form.kernel.exact for form in trial.forms):
            expected = _run(inputs.plain(), device, lambda: None)
    for form in trial.forms:
        for name, over in ((form.name, None), *((name, each) for name, (_, each) in form.over.items())):
            same = False
            if inputs is not None and (expected is not None or not form.kernel.exact):
                with _refusals(trial):
                    if device == "cuda":  # a first call allocates what libraries keep, or try
                        inputs.by_parts(form.kernel, form.parts, over)()
                    call = inputs.by_parts(form.kernel, form.parts, over)
                    mark(name)
                    found = _run(call, device, partial(mark, ""))
                    same = not form.kernel.exact or (expected is not None and _is_same(expected, found))
                mark("")
            yield name, same
            if over is None and not same:
                logger.info("%s by %d parts has other bits", trial.node, form.parts)
                break


@contextmanager
def _refusals(trial: _Trial) -> Iterator[None]:
    """Tell of a kernel that does not take these sizes, whatever it raises."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        logger.warning("%s cannot be tried by parts: %s", trial.node, error)


def _is_same(expected: _Result, found: _Result) -> bool:
    """Whether two calls have the same bits, and left the generator in the same state."""
    if not torch.equal(expected[1], found[1]) or len(expected[0]) != len(found[0]):
        return False
    return all(
        (a is None and b is None)
        or (a is not None and b is not None and a.stride() == b.stride() and _equal(a, b))
        for a, b in zip(expected[0], found[0], strict=True)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))


def _run(call: Callable[[], Any], device: str, done: Callable[[], None]) -> _Result:
    """A call's results from a given seed, and the state of the generator; ``done`` is called between."""
    # torch.manual_seed seeds devices as well, which takes milliseconds where there are none
    generator = torch.cuda if device == "cuda" else torch.default_generator
    generator.manual_seed(0)
    results = call()
    done()
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    return list(results) if isinstance(results, (list, tuple)) else [results], state
