"""Port a plan to a graph that was captured on another device, or under other names, op by op.

PyTorch calls some kernels by other names on other devices (flash attention on CPU and CUDA, cuDNN's
normalizations), and these may hand out other extra values. What a schedule says, which op runs when, means
the same where both graphs hold the same ops in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from hybridremat.graph.joint import JointGraph, Op, Schedule
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.planning.plan import Plan
from hybridremat.plans.block_summary import planned_blocks
from hybridremat.plans.origin import Origin

# Parts of names that tell who wrote a kernel, or for which device, not what it computes.
_MAKERS = {
    *("native", "cudnn", "miopen", "mkldnn", "flash", "efficient", "fused", "legit", "functional"),
    *("for", "cpu", "cuda", "overrideable"),
}


def kernel_kind(target: str) -> str:
    """What an op computes, whoever wrote it: ``layer_norm`` for ``aten.native_layer_norm.default``."""
    parts = target.split(".")
    if parts[0] != "aten" or len(parts) < 2:
        return target
    words = [word for word in parts[1].split("_") if word and word not in _MAKERS]
    return "_".join(words) or parts[1]


def first_difference(planned: JointGraph, graph: JointGraph, *, kernels: bool) -> str | None:
    """The first op in which two graphs differ; None if they hold the same ops on values of the same shapes.

    ``kernels``: whether ops have to be the same kernels with the same outputs. Otherwise it is enough that
    they compute the same: further outputs (generator states, statistics) differ by device.
    """
    for was, now in zip(planned.ops, graph.ops, strict=False):
        before, here = _described(planned, was, kernels=kernels), _described(graph, now, kernels=kernels)
        if before != here:
            place = f" in {now.module}" if now.module else ""
            return f"op {now.id}{place} is {here}, and was {before}"
    if len(planned.ops) != len(graph.ops):
        return f"its graph has {len(planned.ops)} ops, and this one {len(graph.ops)}"
    return None


def port_obstacle(planned: JointGraph, graph: JointGraph) -> str | None:
    """Why a schedule of one graph cannot be one of the other, from another device; None if it can."""
    if (difference := first_difference(planned, graph, kernels=False)) is not None:
        return difference
    place_of = _places(planned, graph)
    for name in ("held_outputs", "released_outputs", "gradients"):
        if _moved(getattr(planned, name), place_of) != getattr(graph, name):
            return f"its {name.replace('_', ' ')} differ"
    return None


def _described(graph: JointGraph, op: Op, *, kernels: bool) -> str:
    name = op.target if kernels else kernel_kind(op.target)
    made = [graph.values[value] for value in (op.writes if kernels else op.writes[:1])]
    results = [f"{'×'.join(map(str, value.shape)) or 'scalar'} {value.dtype}" for value in made]
    phase = [] if kernels else [f"({op.phase}{', in place' if op.mutates else ''})"]
    return " ".join([name, *results, *phase])


def not_run_once(graph: JointGraph, schedule: Schedule) -> Op | None:
    """An op that must run once here, and runs more often or never in the schedule."""
    runs = Counter(schedule.steps)
    return next((op for op in graph.ops if not op.recomputable and runs[op.id] != 1), None)


def ported_chain(chain: Chain, graph: JointGraph) -> Chain:
    """The same blocks over the ops of ``graph``, between the values that take the place of theirs."""
    place_of = _places(chain.graph, graph)
    return replace(
        chain,
        graph=graph,
        boundary=tuple(_moved(values, place_of) for values in chain.boundary),
        gradient_boundary=tuple(_moved(values, place_of) for values in chain.gradient_boundary),
        always=_moved(chain.always, place_of),
    )


def _places(planned: JointGraph, graph: JointGraph) -> dict[int, int]:
    """For each value that an op makes, the one that the same op makes here in the same place."""
    pairs = zip(planned.ops, graph.ops, strict=True)
    return {was: now for before, here in pairs for was, now in zip(before.writes, here.writes, strict=False)}


def _moved(values: Iterable[int], place_of: dict[int, int]) -> frozenset[int]:
    return frozenset(place_of[value] for value in values if value in place_of)


def with_local_names(plan: Plan, graph: JointGraph, here: Origin) -> Plan:
    """``plan`` with the names of modules and the lines of ``graph``, the same graph traced here."""
    details = plan.details
    if details is None:
        return replace(plan, origin=here)
    pairs = zip(details.graph.ops, graph.ops, strict=True)
    ops = tuple(replace(op, module=own.module, source=own.source) for op, own in pairs)
    if ops == details.graph.ops:
        return replace(plan, origin=here)
    chain = replace(details.chain, graph=replace(details.graph, ops=ops))
    return replace(
        plan,
        blocks=planned_blocks(chain, details.block_options, plan.schedule, details.decisions),
        origin=here,
        details=replace(details, chain=chain),
    )
