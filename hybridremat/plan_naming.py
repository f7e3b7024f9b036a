"""Names in a plan that was made in another run: modules may be called otherwise there, and lines have moved.

The graph is the same, and so is what runs; what is shown of it has to speak of the model at hand.
"""

from __future__ import annotations

from dataclasses import replace

from hybridremat.graph.joint import JointGraph
from hybridremat.plan_making import planned_blocks
from hybridremat.plan_records import Origin
from hybridremat.planner import ChainPlan
from hybridremat.plans import Plan


def named_here(plan: Plan, graph: JointGraph, here: Origin) -> Plan:
    """``plan`` with the names of modules and the lines of ``graph``, the same graph traced here."""
    details = plan.details
    if details is None:
        return replace(plan, origin=here)
    pairs = zip(details.graph.ops, graph.ops, strict=True)
    ops = tuple(replace(op, module=own.module, source=own.source) for op, own in pairs)
    if ops == details.graph.ops:
        return replace(plan, origin=here)
    chain = replace(details.chain, graph=replace(details.graph, ops=ops))
    options = tuple(details.option_sets[number] for number in details.option_set_of)
    return replace(
        plan,
        blocks=planned_blocks(ChainPlan(chain, (), options), plan.schedule, details.decisions),
        origin=here,
        details=replace(details, chain=chain),
    )
