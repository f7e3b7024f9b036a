"""Checks of a plan that was read: blocks, options and decisions have to fit its graph and schedule.

Explanations and reports are computed from these without the model, and rely on it.
"""

from __future__ import annotations

from hybridremat.blocks.problem import bind_blocks
from hybridremat.blocks.simulate import simulate_option
from hybridremat.blocks.types import BlockProblem, OptionSet
from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.segmentation.validate import validate_chain
from hybridremat.graph.validate import require_sound_graph
from hybridremat.plans.block_summary import planned_blocks
from hybridremat.plans.coverage import Coverage
from hybridremat.plans.judging import plan_judge
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.policy import validated_policy
from hybridremat.plans.records import PlanDetails
from hybridremat.sequence.flatten import Flattener
from hybridremat.units import require_count


def require_sound(plan: PlanData) -> None:
    """Raise ValueError or LookupError if the parts of a plan do not fit together."""
    for part in plan.parts:
        require_sound(part)
    if plan.places and {*plan.places} != {*range(len(plan.parts))}:
        raise ValueError("its places are not those of its parts")
    if [block.index for block in plan.blocks] != [*range(len(plan.blocks))]:
        raise ValueError("its blocks are not numbered by their places")
    policy = validated_policy(plan.request.policy or {})
    if any(policy.get(pin.pattern) != pin.action for pin in plan.pins):
        raise ValueError("its pins are not those of its policy")
    plan.request.reserve_bytes()
    require_count("forwards", plan.forwards, "")
    if plan.strategy_gap is not None and not 0 <= plan.strategy_gap <= 1:
        raise ValueError("its strategy saves more than its time")
    if plan.details is None:
        return
    require_sound_graph(plan.details.graph)
    _require_sound_schedule(plan.schedule, plan.details.graph)
    peak = step_memory(plan.details.graph, plan.schedule).peak
    if plan.compiler == "eager" and peak != plan.predicted_peak:  # else it is that of generated code
        raise ValueError(f"its schedule takes {peak} bytes, and it says {plan.predicted_peak}")
    if plan.schedule.moves and plan.details.link is None:
        raise ValueError("its values move, and it knows no link")
    host = plan_judge(plan, plan.details).host_bytes(plan.schedule)
    if host != plan.host_bytes:
        raise ValueError(f"its moves take {host} bytes of host memory, and it says {plan.host_bytes}")
    _require_sound_details(plan, plan.details)
    if plan.coverage is not None:
        _require_sound_coverage(plan.coverage, plan, plan.details)


def _require_sound_schedule(schedule: Schedule, graph: JointGraph) -> None:
    if not 0 <= schedule.num_forward <= len(schedule.steps):
        raise ValueError("its forward is longer than its schedule")
    if not {*range(len(graph.ops))}.issuperset(schedule.steps):
        raise ValueError("it runs ops that are not there")
    made = {value for op in schedule.steps for value in graph.ops[op].writes}
    leaving = {each.gradient for each in graph.deliveries}
    if any(graph.values[value].producer is not None for value in leaving - made):
        raise ValueError("it does not compute all gradients that leave in its backward")


def _require_sound_coverage(coverage: Coverage, plan: PlanData, details: PlanDetails) -> None:
    names = {*coverage.own}
    if names != {*coverage.places} or names != {*coverage.domain.ranges}:
        raise ValueError("its sizes have no places among its inputs, or no range")
    if coverage.sizes_of(plan.origin, plan.origin.inputs) != coverage.own:
        raise ValueError("its sizes are not those of its inputs")
    for known in coverage.schedules:
        _require_sound_schedule(known.schedule, details.graph)
        step_memory(details.graph, known.schedule)
        if any(not 0 <= op < len(details.graph.ops) for op, _ in known.parted):
            raise ValueError("it runs ops by parts that are not there")


def _require_sound_details(plan: PlanData, details: PlanDetails) -> None:
    chain = details.chain
    validate_chain(chain)
    bindings, option_sets = bind_blocks(chain), details.block_options
    problems = [binding.problem for binding in bindings]
    for problem, options in set(zip(problems, option_sets, strict=True)):
        _require_options_run(problem, options)
    if details.decisions:  # in an order in which they can be carried out
        step_memory(chain.graph, Flattener(chain, bindings, option_sets)(details.decisions))
    if planned_blocks(chain, option_sets, plan.schedule, details.decisions) != plan.blocks:
        raise ValueError("its blocks are not what its decisions say")


def _require_options_run(problem: BlockProblem, options: OptionSet) -> None:
    """Simulate each option. Figures are not compared: they belong to the device that the plan was made on."""
    for family, solo in ((options.options, False), (options.solo, True)):
        for option in family:
            simulate_option(
                problem.for_rerun, option.saved, option.optional_forward, option.recompute, solo=solo
            )
