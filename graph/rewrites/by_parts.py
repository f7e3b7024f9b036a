"""Ops by parts: a kernel of :mod:`part_kernels` in place of the op's own, where that takes more memory.

A form counts only where a trial gives the same bits, and of random ops leaves the generator in the same
state. Of those that pay, the one that takes least becomes a variant of the op, which schedules may choose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from torch import fx

from hybridremat.graph.costs.kernel_benchmarks import memory_errors
from hybridremat.graph.costs.kernel_clocks import clock_for
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import Kernels, device_of, distinct_kernels
from hybridremat.graph.joint import Op, Variant
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.rewrites.in_place import laid_out_alike
from hybridremat.graph.rewrites.part_kernels import KERNELS, STANDS_FOR, PartedKernel, parted_kernels
from hybridremat.graph.rewrites.rewrite import Call, Form, Rewrite
from hybridremat.graph.rewrites.trial import Inputs, Trial, Way, tried
from hybridremat.graph.tracing.fx_nodes import tensors
from hybridremat.graph.tracing.signature import distinct_arguments
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)

WORTH = 0.95  # of what a kernel takes with its result: parts that take more than this are left out

OTHER_BITS: Final = -1  # what is kept as the workspace of a kernel whose bits are not the plain ones

ENOUGH = 0.7  # of the same: where parts take no more than this, no further way is tried


@dataclass(frozen=True)
class Parts:
    """A kernel in a number of parts, and the names under which trials of it are kept.

    ``over``: by name of the trial, the value that it may write its first result over, and the input.
    """

    name: str
    kernel: PartedKernel
    parts: int
    over: Mapping[str, tuple[int, fx.Node]]

    def ways(self) -> Iterator[Way]:
        """What is to be tried."""
        form = self.kernel.form(self.parts)
        yield Way(self.name, form, exact=self.kernel.exact)
        yield from (Way(name, form, source, self.kernel.exact) for name, (_, source) in self.over.items())

    def elements(self, node: fx.Node) -> int:
        """Elements of the largest part of its first result."""
        result = tensors(node.meta.get("val"))[0]
        assert self.kernel.largest is not None
        return self.kernel.largest(result, self.parts)

    def variant(self, op: Op, store: KernelStore) -> Variant | None:
        """The variant, over what takes no more workspace; None unless its bits are known to be the same."""
        workspace = store.by_parts.get(self.name)
        if workspace is None or workspace < 0:
            return None
        tried = ((value, store.by_parts.get(name)) for name, (value, _) in self.over.items())
        over = tuple(value for value, takes in tried if takes is not None and 0 <= takes <= workspace)
        return Variant(self.kernel.run.__name__, self.parts, op.time, workspace, over)


@dataclass(frozen=True)
class _Site:
    """An op, its call, the bytes of its results, and the forms that may pay, as far as sizes tell.

    A later form does by parts what those before it do, and more: it has other bits if they have.
    """

    op: Op
    node: fx.Node
    written: int
    forms: tuple[Parts, ...] = ()

    @property
    def takes(self) -> int:
        """Bytes that the op's own kernel takes with its results, if it writes them over nothing."""
        return self.op.temp + self.written * (not self.op.overwrites)

    def takes_by(self, variant: Variant) -> int:
        """What a variant takes with its results."""
        return variant.temp + self.written * (not variant.overwrites)

    def wanted(self, store: KernelStore) -> tuple[Parts, ...]:
        """The first form; the next one, too, where that has the same bits and does not save enough."""
        for count, form in enumerate(self.forms, 1):
            variant = form.variant(self.op, store)
            if variant is None or self.takes_by(variant) <= ENOUGH * self.takes:
                return self.forms[:count]
        return self.forms


def sites_of(step: TracedStep) -> list[_Site]:
    """The ops that may pay in a form by parts, as far as sizes tell."""
    kernels = distinct_kernels(step)
    found = []
    for op in step.graph.ops if kernels.device != "meta" else ():
        node, key = step.op_nodes[op.id], kernels.key_of[op.id]
        if not key or not op.recomputable:
            continue
        site = _Site(op, node, sum(step.graph.values[value].bytes for value in op.writes))
        alike = list(laid_out_alike(step, op.id, node.all_input_nodes))
        forms = []
        for kernel, parts in parted_kernels(node):
            name = f"{key} of {distinct_arguments(node)} by {parts} {kernel.run.__name__}"
            places = {f"{name} over {node.all_input_nodes.index(each[1])}": each for each in alike}
            over = places if kernel.exact else {}
            if over or site.written < WORTH * site.takes:  # at best a form takes no workspace
                forms.append(Parts(name, kernel, parts, over))
        if forms:
            found.append(replace(site, forms=tuple(forms)))
    return found


def _proven(step: TracedStep, sites: Sequence[_Site], store: KernelStore) -> list[tuple[_Site, Variant]]:
    """For each op for which one pays, the form that takes least."""
    for _ in range(max((len(site.forms) for site in sites), default=0)):
        if missing := list(_missing(sites, store)):
            store.by_parts.update(workspaces(missing, device_of(step.op_nodes)))
    found = []
    for site in sites:
        variants = [each for form in site.wanted(store) if (each := form.variant(site.op, store))]
        best = min(variants, key=lambda each: (each.temp, not each.overwrites), default=None)
        if best is not None and site.takes_by(best) < WORTH * site.takes:
            found.append((site, best))
    return found


def _missing(sites: Sequence[_Site], store: KernelStore) -> Iterator[Trial]:
    """What the store does not tell about the forms of ops.

    Of two ops with the same kernel one may write over an input that the other may not. A form that is known
    to have other bits is tried over nothing.
    """
    seen: set[str] = set()
    for site in sites:
        ways: list[Way] = []
        for form in site.wanted(store):
            names = (form.name, *(form.over if store.by_parts.get(form.name) != OTHER_BITS else ()))
            unknown = {name for name in names if store.by_parts.get(name) is None}
            if not unknown <= seen:
                ways += form.ways()
                seen |= unknown
        if ways:
            yield Trial(site.node, tuple(ways))


def workspaces(trials: Sequence[Trial], device: str) -> dict[str, int]:
    """By name the bytes that each way takes beyond its results."""
    found = tried(trials, device, "by parts")
    for trial in trials:
        for way in trial.ways:
            if way.over is None and found[way.name] is None:
                logger.info("%s by %d parts has other bits", trial.node, way.form.fixed["parts"])
    return {name: OTHER_BITS if each is None else each[0] - each[1] for name, each in found.items()}


def _write(step: TracedStep, proven: Sequence[tuple[_Site, Variant]]) -> TracedStep:
    ops = list(step.graph.ops)
    for site, best in proven:
        own = Variant("", 1, site.op.time, site.op.temp, site.op.overwrites)
        ops[site.op.id] = replace(site.op, variants=(own, best))
    return replace(step, graph=replace(step.graph, ops=tuple(ops)))


def _timed(step: TracedStep, store: KernelStore) -> TracedStep:
    """The ways by parts take the op's own time, as they compare when timed in turn."""
    kernels = distinct_kernels(step)
    ops = tuple(_timed_op(step.op_nodes[op.id], op, kernels, store) for op in step.graph.ops)
    return replace(step, graph=replace(step.graph, ops=ops))


def _timed_op(node: fx.Node, op: Op, kernels: Kernels, store: KernelStore) -> Op:
    if not op.variants:
        return op
    own, parts = op.variants
    name = f"{kernels.key_of[op.id]} of {distinct_arguments(node)} by {parts.parts} {parts.kernel}"
    if (percent := store.times.get(name)) is None:
        percent = _percent(node, parts, kernels.device)
        store.times.update({name: percent})
    alone = store.times.get(kernels.key_of[op.id]) or own.time
    timed = replace(parts, time=own.time + max(0, alone * (percent - 100) // 100))
    return replace(op, variants=(own, timed))


def _percent(node: fx.Node, parts: Variant, device: str) -> int:
    """The least time of a kernel by parts as a percentage of the op's own, timed one after the other."""
    clock = clock_for(device)
    with outside_tracing(), memory_errors():
        inputs = Inputs(node)  # real ones: a step is planned in the middle of its trace
        own = clock.least(inputs.plain())
        by_parts = clock.least(inputs.by(KERNELS[parts.kernel].form(parts.parts)))
    percent: int = max(1, 100 * by_parts // max(1, own))
    return percent


def _form(step: TracedStep, op: int, over: int | None) -> tuple[Form, fx.Node | None] | None:
    how, node = step.graph.ops[op].runs, step.op_nodes[op]
    source = dict(laid_out_alike(step, op, node.all_input_nodes)).get(over) if over is not None else None
    known = how.kernel in KERNELS and (source is None) == (over is None)
    return (KERNELS[how.kernel].form(how.parts), source) if known else None


def _term(call: Call, _plain: Callable[[fx.Node], Call]) -> Call | None:
    return Call(STANDS_FOR[call.target], call.args) if call.target in STANDS_FOR else None


BY_PARTS: Final = Rewrite(
    name="by parts",
    of_ops=True,
    find=sites_of,
    proven=_proven,
    write=_write,
    timed=_timed,
    form=_form,
    term=_term,
)
