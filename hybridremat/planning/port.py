"""Port a plan, op by op, to a graph that was captured on another device or has other module names.

Some kernels have other names and other extra outputs on other devices (flash attention, cuDNN's
normalizations). A schedule, which op runs when, is valid if both graphs have the same ops in the same order.
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

# Words in kernel names that tell the library or the device, not what is computed.
_VENDOR_WORDS = {
    *("native", "cudnn", "miopen", "mkldnn", "flash", "efficient", "fused", "legit", "functional"),
    *("for", "cpu", "cuda", "overrideable"),
}


def kernel_kind(target: str) -> str:
    """What an op computes, on any device: ``layer_norm`` for ``aten.native_layer_norm.default``."""
    parts = target.split(".")
    if parts[0] != "aten" or len(parts) < 2:
        return target
    words = [word for word in parts[1].split("_") if word and word not in _VENDOR_WORDS]
    return "_".join(words) or parts[1]


def first_difference(planned: JointGraph, graph: JointGraph, *, kernels: bool) -> str | None:
    """The first op in which two graphs differ; None if they have the same ops on the same shapes.

    ``kernels``: whether kernels and all outputs have to be equal. Otherwise the op kind and the first output
    have to be: further outputs (generator states, statistics) differ by device.
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
    """Why a schedule of ``planned`` is not one of ``graph``, from another device; None if it is."""
    if (difference := first_difference(planned, graph, kernels=False)) is not None:
        return difference
    value_of = _value_map(planned, graph)
    for name in ("held_outputs", "released_outputs", "gradients"):
        if _mapped(getattr(planned, name), value_of) != getattr(graph, name):
            return f"its {name.replace('_', ' ')} differ"
    return None


def _described(graph: JointGraph, op: Op, *, kernels: bool) -> str:
    name = op.target if kernels else kernel_kind(op.target)
    made = [graph.values[value] for value in (op.writes if kernels else op.writes[:1])]
    results = [f"{'×'.join(map(str, value.shape)) or 'scalar'} {value.dtype}" for value in made]
    phase = [] if kernels else [f"({op.phase}{', in place' if op.mutates else ''})"]
    return " ".join([name, *results, *phase])


def not_run_once(graph: JointGraph, schedule: Schedule) -> Op | None:
    """An op that has to run exactly once, and does not in the schedule."""
    runs = Counter(schedule.steps)
    return next((op for op in graph.ops if not op.recomputable and runs[op.id] != 1), None)


def ported_chain(chain: Chain, graph: JointGraph) -> Chain:
    """The same blocks over ``graph``, with its values at the boundaries."""
    value_of = _value_map(chain.graph, graph)
    return replace(
        chain,
        graph=graph,
        boundary=tuple(_mapped(values, value_of) for values in chain.boundary),
        gradient_boundary=tuple(_mapped(values, value_of) for values in chain.gradient_boundary),
        always=_mapped(chain.always, value_of),
    )


def _value_map(planned: JointGraph, graph: JointGraph) -> dict[int, int]:
    """The value of ``graph`` for each of ``planned``: the same output of the same op."""
    pairs = zip(planned.ops, graph.ops, strict=True)
    return {was: now for before, here in pairs for was, now in zip(before.writes, here.writes, strict=False)}


def _mapped(values: Iterable[int], value_of: dict[int, int]) -> frozenset[int]:
    return frozenset(value_of[value] for value in values if value in value_of)


def with_local_names(plan: Plan, graph: JointGraph, here: Origin) -> Plan:
    """``plan`` with module names, source lines and checkpoints of ``graph``, an equal graph traced here."""
    details = plan.details
    if details is None:
        return replace(plan, origin=here)
    pairs = zip(details.graph.ops, graph.ops, strict=True)
    ops = tuple(replace(op, module=own.module, source=own.source) for op, own in pairs)
    named = replace(details.graph, ops=ops, checkpointed=graph.checkpointed)
    if named == details.graph:
        return replace(plan, origin=here)
    chain = replace(details.chain, graph=named)
    return replace(
        plan,
        blocks=planned_blocks(chain, details.block_options, plan.schedule, details.decisions),
        origin=here,
        details=replace(details, chain=chain),
    )
