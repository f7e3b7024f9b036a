"""A plan of the caller that is for many sizes: whether it has schedules for a step, and which."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from hybridremat.blocks.problem import bind_blocks
from hybridremat.graph.joint import ops_by_parts
from hybridremat.planning.chain_plan import ChainPlan
from hybridremat.planning.context import PlanContext
from hybridremat.planning.other_sizes import known_for, with_ways
from hybridremat.planning.plan import Plan
from hybridremat.planning.stages import plain_point_of
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.judging import plan_judge
from hybridremat.plans.origin import Origin
from hybridremat.plans.plan_data import row_of
from hybridremat.sequence.pool import Pool


def covers_elsewhere(plan: Plan, here: Origin) -> bool:
    """Whether a plan has schedules for a step, and not for the very sizes that it was made for."""
    known = plan.coverage
    if known is None or known.differences(plan.origin, here):
        return False
    return known.sizes_of(plan.origin, here.inputs) != known.own


def covering(plan: Plan, given: Plan, context: PlanContext) -> Plan:
    """A plan at other sizes, with what the caller's is for, and the sizes that have been planned since."""
    assert given.coverage is not None
    sizes = given.coverage.sizes_of(given.origin, context.origin.inputs)
    if sizes is None:
        return plan
    before = (each.coverage.rows for each in context.store.whole() if each.coverage is not None)
    rows = (*chain.from_iterable(before), row_of(plan, sizes))
    return replace(plan, coverage=given.coverage.knowing(sizes, rows))


def frontier_of_file(plan: Plan) -> StepFrontier:
    """The schedules that a plan has for all sizes that it covers, at its own."""
    assert plan.details is not None and plan.coverage is not None
    details = plan.details
    own = next(known_for(details.graph, plan.schedule, details.graph))
    known = dict.fromkeys((own, *plan.coverage.schedules))
    graph = with_ways(details.graph, dict(pair for each in known for pair in each.parted))
    judge, points = replace(plan_judge(plan, details), graph=graph), []
    for each in known:
        parted = frozenset(op for op, _ in each.parted)
        made = judge.with_ops_of(ops_by_parts(graph, parted))
        points.append(replace(made(each.schedule), parted=parted, chain=0))
    blocks = ChainPlan(details.chain, tuple(bind_blocks(details.chain)), details.block_options)
    every = tuple(sorted(points, key=lambda each: (each.needs, each.time)))  # elsewhere any may be the best
    return StepFrontier(judge, (blocks,), Pool(every, every), plain_point_of(judge), {}, reused_options=True)
