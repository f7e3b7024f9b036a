"""The schedule of a step: its plan if there is one, or search, choose; search: segment, solve, compose."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Final, Protocol

from hybridremat.blocks.types import BlockSolver
from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.errors import InfeasibleLimitError, OffloadError, PlanMismatchError, PolicyError
from hybridremat.graph.costs.kernels import device_of
from hybridremat.graph.deadline import NO_DEADLINE, Deadline
from hybridremat.graph.joint import JointGraph, Phase
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.accept import require_as_planned, require_code_within_limit, under_checked_policy
from hybridremat.planning.chain_plan import ChainPlan
from hybridremat.planning.choose import choose_plan
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.graph_frontier import GraphFrontier
from hybridremat.planning.known_plans import keep_plan, known_plan
from hybridremat.planning.option_cache import OPTIONS, OptionCache, options_on_disk
from hybridremat.planning.plan import Plan
from hybridremat.planning.progress import Progress, Stopwatch, Timings, no_progress
from hybridremat.planning.rank_agreement import require_planned_together
from hybridremat.planning.settings import OnInfeasible, Settings
from hybridremat.planning.stages import forward_frontier, plain_point, segment_graph, solve_options
from hybridremat.planning.step_costs import costed, kernel_store, note_checkpointing
from hybridremat.planning.step_frontier import StepFrontier
from hybridremat.plans.origin import Origin
from hybridremat.plans.policy import Pinned, resolve_policy
from hybridremat.sequence.effort import FOR_BLOCKS, TYPICAL_GAP, WHOLE, PlanningEffort
from hybridremat.sequence.exchange.improve import search_ranges
from hybridremat.sequence.frontier import Ranges, Wanted
from hybridremat.sequence.judge import Judge
from hybridremat.sequence.outside_memory import NO_OUTSIDE_MEMORY, OutsideMemory
from hybridremat.sequence.parts import PartsChooser
from hybridremat.sequence.pool import Pool, SchedulePoint
from hybridremat.sequence.strategies import STRATEGIES, Strategy, WholeGraph
from hybridremat.sequence.strategies.hybrid import HYBRID
from hybridremat.units import format_bytes

if TYPE_CHECKING:
    from hybridremat.compiler.offload.stores import Stores
    from hybridremat.planning.lowered_judge import Lowering
    from hybridremat.planning.moving import Moving
    from hybridremat.sequence.search import Search

logger = logging.getLogger(__name__)

def choose_schedule(traced: TracedStep, context: PlanContext) -> Chosen:
    """The schedule of a traced step's plan, which becomes the current plan of the store.

    Raises
    ------
    HybridRematError
        As :func:`hybridremat.wrap`.
    """
    note_checkpointing(traced, context)
    step = under_checked_policy(traced, context)
    ready = known_plan(step, context)
    is_new = ready is None or ready.details is None
    if ready is not None and ready.details is not None:
        plan = ready
    else:
        if context.build:
            require_planned_together(context.settings, context.agreement)
        step, timings = costed(step, context)
        if (led := context.agreement.plan_of_leader(step.graph)) is not None:
            plan = led
        else:
            plan = ready or make_plan(step, timings, context)
            context.agreement.tell(plan)
    return adopted(plan, step, context, keep=is_new)


def adopted(plan: Plan, step: TracedStep, context: PlanContext, *, keep: bool) -> Chosen:
    """The schedule of a plan of a step, which becomes the current one of the store.

    ``keep``: whether other processes get it, once its graphs have passed.
    """
    stores = stores_for(plan, step, context) if plan.schedule.moves else None
    context.store.add(plan)
    context.progress("emitting", 0, 1)
    started = partial(context.store.use, plan.fingerprint)
    if plan.details is not None:  # with the workspaces of its code, and what runs by parts
        step = replace(step, graph=plan.details.graph)
    if plan.compiler == "inductor":
        if keep:
            keep_plan(plan, context)
        accept_code = partial(require_code_within_limit, plan, step.graph)
        return Chosen(
            step,
            plan.schedule,
            started=started,
            accept_code=accept_code,
            lean=plan.lean,
            plain=plan.plain_code,
        )
    return Chosen(
        step,
        plan.schedule,
        plan.memory_limit,
        accept=partial(_accept, plan, step.graph, context if keep else None),
        started=started,
        stores=stores,
    )


def require_host_memory(plan: Plan, settings: Settings) -> None:
    """Raise OffloadError if a plan, perhaps of a file, takes more host memory than it may."""
    taken, limit = plan.host_bytes * settings.forwards, settings.host_bytes()
    if taken > limit:
        raise OffloadError(
            f"the moves of this plan take {format_bytes(taken)} of host memory, and host_memory_limit= is "
            f"{format_bytes(limit)}: raise it, or plan anew under it"
        )


def stores_for(plan: Plan, step: TracedStep, context: PlanContext, part: Hashable = None) -> Stores:
    """Where the values of a plan, perhaps of a file, wait: there is room for its moves.

    ``part``: which of several that wait beside each other.

    Raises
    ------
    PlanMismatchError, OffloadError
        If they cannot wait where the settings say.
    """
    settings, device = context.settings, device_of(step.op_nodes)
    if settings.offload is None:
        raise PlanMismatchError("values of this plan wait elsewhere: pass offload= as when it was made")
    require_host_memory(plan, settings)
    stores = context.store.stores(settings, device, part)
    if settings.spec is None and device != "meta":
        stores.target.require_usable(device)
    stores.require(plan.host_bytes)
    return stores


def _accept(plan: Plan, graph: JointGraph, keep_in: PlanContext | None, memory: EmittedMemory) -> None:
    """Keep a new plan for other processes once the checker has let its graphs pass."""
    require_as_planned(plan, graph, memory)
    if keep_in is not None:
        keep_plan(plan, keep_in)


def make_plan(
    step: TracedStep,
    timings: Timings,
    context: PlanContext,
    *,
    on_infeasible: OnInfeasible | None = None,
) -> Plan:
    """A new plan for a step with costs.

    The first of a model solves every block. Later ones are made in the middle of training, and reuse options
    of blocks that differ in sizes alone, unless nothing fits that way. A search of what can be won back comes
    first; if nothing fits there, but may, one of :data:`~hybridremat.sequence.effort.WHOLE` seconds.
    ``on_infeasible``: as in the settings, if it is not theirs.

    Raises
    ------
    InfeasibleLimitError, PolicyError
        If no plan satisfies the request.
    """
    at_last = on_infeasible or context.settings.on_infeasible
    reuses = (True, False) if len(context.store) else (False,)
    attempts = [(reuse, bounded) for reuse in reuses for bounded in (True, False)]
    tried: list[GraphFrontier] = []
    while True:
        reuse, bounded = attempts.pop(0)
        seconds = None if bounded else WHOLE
        frontier = step_frontier(
            step, timings, context, reuse=reuse, for_one_plan=True, bounded=True, seconds=seconds
        )
        if bounded and not frontier.counted.curtailed:
            attempts.remove((reuse, False))  # it would find the same
        tried.append(frontier)
        if not attempts:  # one of them may have found what takes least, by chance
            last_first = tried[::-1]
            frontier = min(last_first, key=lambda each: each.least_needs(None)) if tried[1:] else frontier
        context.progress("improving", 0, 1)
        try:
            plan = choose_from(  # choose
                frontier, context.settings, context.origin, on_infeasible="error" if attempts else at_last
            )
            break
        except InfeasibleLimitError:
            if attempts and _nothing_can_fit(frontier, context):
                attempts = [] if at_last == "error" else [(False, False)]
            if not attempts:
                raise
        whole = "solved anew" if reuse and not attempts[0][0] else "solved whole"
        logger.info("nothing fits with the options of blocks that were looked at first; these are %s", whole)
    settings = context.settings
    if settings.budget_seconds() is None or plan.details is None or settings.compiler == "inductor":
        return plan
    context.progress("bounding", 0, 1)
    from hybridremat.plans.certify import certificate_of  # programs of their own
    from hybridremat.sequence.bounds.certificate import QUICK

    return replace(plan, certificate=certificate_of(plan, QUICK))


class Combined(Protocol):
    """The frontier of a step of several graphs (``breaks/frontier.py``)."""

    def plan_for(self, settings: Settings, origin: Origin, *, on_infeasible: OnInfeasible) -> Plan:
        """The plan that the settings ask for."""
        ...


def choose_from(
    frontier: GraphFrontier | Combined,
    settings: Settings,
    origin: Origin,
    *,
    on_infeasible: OnInfeasible = "error",
) -> Plan:
    """The plan that the settings ask for: of a step of one graph, or of several."""
    if isinstance(frontier, GraphFrontier):
        return choose_plan(frontier, settings, origin, on_infeasible=on_infeasible)
    return frontier.plan_for(settings, origin, on_infeasible=on_infeasible)


def _nothing_can_fit(frontier: GraphFrontier, context: PlanContext) -> bool:
    """Whether a bound proves what a search did not find."""
    limit = context.settings.limit_bytes(frontier.plain_peak, least=0)
    if limit is None:
        return False
    context.progress("bounding", 0, 1)
    return frontier.proves_infeasible(limit)


def step_frontier(
    step: TracedStep,
    timings: Timings,
    context: PlanContext,
    *,
    reuse: bool = False,
    for_one_plan: bool = False,
    bounded: bool = False,
    seconds: float | None = None,
    alone: bool = True,
    share: float = 1.0,
    searched: bool = True,
) -> GraphFrontier:
    """The frontier of a step with costs, under the context's policy; ``timings`` of earlier stages.

    Parameters
    ----------
    for_one_plan
        Nobody will ask it for anything but the plan of the context's limit, so it is thin elsewhere; unless
        the overhead is bounded too, which may lead anywhere, or the step is compiled: which points keep the
        limit, is not known before they are lowered.
    bounded, seconds
        Searches go as far as the plan can win back, or so many seconds of a nominal core, unless the caller
        says for how long.
    alone
        Whether it is the whole step; what is alive around a step of several graphs is added to all of them
        together.
    share
        Of the time of a planning budget.
    searched
        Whether schedules are looked for; else it has the plain step alone.
    """
    settings, lowering = context.settings, None
    if settings.compiler == "inductor" and has_backward(step.graph):
        from hybridremat.planning.lowered_judge import Lowering  # takes a second

        lowering = Lowering.of_plain_step(step, timings, context)
        step, timings = lowering.step, lowering.timings
    pinned = resolve_policy(step.graph, settings.policy)
    outside = settings.outside_memory() if alone else NO_OUTSIDE_MEMORY
    if not searched:
        counted = forward_frontier(Judge(step.graph, pinned.pins, outside), pinned.records, timings)
        return _with_code(counted, lowering, context)
    plain_peak = plain_point(step.graph).peak
    limit = settings.limit_bytes(plain_peak, least=0)  # one of several graphs may take nothing
    ranges = None
    if for_one_plan and limit is not None and settings.overhead_limit() is None and lowering is None:
        ranges = search_ranges(limit, plain_peak)
    counted = plan_graph(
        step.graph,
        cache=OPTIONS.with_disk(options_on_disk(settings)),
        workers=settings.workers,
        progress=context.progress,
        reuse=reuse,
        pinned=pinned,
        timings=timings,
        outside=outside,
        with_saved=not alone,
        strategy=STRATEGIES[settings.strategy],
        limit=limit,
        ranges=ranges,
        solver=settings.block_solver,
        deadline=Deadline(settings.budget_seconds()).share(share),
        bounded=bounded and settings.planning_budget is None,
        seconds=seconds,
        moving=moving_for(step, settings),
    )
    return _with_code(counted, lowering, context)


def moving_for(step: TracedStep, settings: Settings) -> Moving | None:
    """How values of a step may move to host memory; None if they do not."""
    if settings.offload is None:
        return None
    from hybridremat.planning.moving import moving_of

    return moving_of(settings, device_of(step.op_nodes), kernel_store(step, settings))


def _with_code(counted: StepFrontier, lowering: Lowering | None, context: PlanContext) -> GraphFrontier:
    """The frontier of a step as it runs: op by op, or compiled."""
    if lowering is None:
        return counted
    from hybridremat.planning.compiled_frontier import CompiledFrontier

    return CompiledFrontier(counted, lowering.judge(counted.judge), context.progress)


SHARES: Final = {"solve": 0.5, "compose": 0.7, "improve": 0.9}
"""Of the time of a budget: when each stage ends with what it has. The rest is for the bound."""


def has_backward(graph: JointGraph) -> bool:
    """Whether there is anything to choose: a forward and a backward."""
    return {Phase.FORWARD, Phase.BACKWARD} <= {op.phase for op in graph.ops}


def plan_graph(
    graph: JointGraph,
    *,
    cache: OptionCache,
    workers: int | None = None,
    progress: Progress = no_progress,
    reuse: bool = False,
    pinned: Pinned | None = None,
    timings: Timings | None = None,
    outside: OutsideMemory = NO_OUTSIDE_MEMORY,
    with_saved: bool = False,
    strategy: Strategy | WholeGraph = HYBRID,
    limit: int | None = None,
    ranges: Ranges | None = None,
    solver: BlockSolver = "auto",
    deadline: Deadline = NO_DEADLINE,
    bounded: bool = False,
    seconds: float | None = None,
    moving: Moving | None = None,
) -> StepFrontier:
    """The frontier of a joint graph with costs: the whole of it, or what is in some ranges.

    Parameters
    ----------
    workers
        Processes that solve blocks; None for one a core. The result is the same for any number.
    reuse
        Whether to reuse options of blocks that differ in sizes alone (:mod:`hybridremat.blocks.pareto`).
    pinned
        What a policy pins in this graph.
    timings
        Seconds of earlier stages.
    outside, with_saved
        See :class:`~hybridremat.sequence.judge.Judge`: a schedule is left out if another needs no more so,
        and no more time.
    strategy
        Search strategy.
    limit
        In bytes: a strategy over the whole graph finds what is the best under this one.
    ranges
        In bytes, where the frontier is asked for; it is thin elsewhere. None: everywhere.
    solver
        What solves the blocks.
    deadline
        When to end with what has been found: each stage has a part of the time (:data:`SHARES`).
    bounded
        Whether searches go only as far as a plan can win back (:class:`PlanningEffort`), once under what is
        won as a rule, and where that leaves blocks aside, again under what the first plan could win.
    seconds
        Of a nominal core, in place of what a plan can win back.
    moving
        How values may move to host memory; None: they do not.

    Raises
    ------
    PolicyError
        If no schedule that was found obeys the pins.
    GraphSizeError
        If the graph is too large for the strategy, or a block for the solver.
    """
    pinned, timed, plain = pinned or Pinned(), Stopwatch(timings or {}), plain_point(graph)
    won = PlanningEffort.of(graph, plain.time) if seconds is None else PlanningEffort(seconds, step=0.0)
    effort = won if bounded else None
    judge = Judge(graph, pinned.pins, outside, with_saved)
    if moving is not None:
        judge = replace(judge, link=moving.link, host_limit=moving.host_limit)
    if not has_backward(graph):
        return forward_frontier(judge, pinned.records, timed.timings)
    if not isinstance(strategy, Strategy):
        from hybridremat.planning.whole_graph import whole_graph_frontier

        whole = whole_graph_frontier(
            judge, strategy, pins=pinned.records, timed=timed, limit=limit, progress=progress
        )
        return replace(whole, searches=_with_moves(whole.searches, judge))
    with timed("segment"):
        chains = segment_graph(judge, progress)  # segment
    found: list[StepFrontier] = []
    allowed = inf if effort is None else effort.seconds(TYPICAL_GAP)
    for _ in range(2):  # in what pays as a rule; if blocks were left aside, in what the first plan can win
        with timed("solve blocks"):
            solved = solve_options(  # solve
                chains,
                cache,
                workers,
                progress,
                reuse=reuse,
                strategy=strategy,
                solver=solver,
                deadline=deadline.share(SHARES["solve"]),
                seconds=allowed * FOR_BLOCKS,
            )
        until = deadline.share(SHARES["compose"])
        with timed("compose"):
            pool = compose(solved.plans, judge, progress, strategy, ranges, until)  # compose
        frontier = StepFrontier(
            judge,
            solved.plans,
            pool,
            plain,
            timed.timings,
            solved.reused,
            pinned.records,
            searches=strategy.searches if strategy.moved else _with_moves(strategy.searches, judge),
            deadline=deadline.share(SHARES["improve"]),
            progress=progress,
            curtailed=solved.curtailed,
            effort=effort,
        )
        found.append(frontier)
        more = 0.0 if effort is None else effort.seconds(frontier.gap_under(limit))
        if not frontier.curtailed or more <= allowed:
            break
        allowed = more
    return min(reversed(found), key=lambda each: each.composed_under(limit) or inf)


def _with_moves(searches: tuple[Search, ...], judge: Judge) -> tuple[Search, ...]:
    """The searches of a strategy, and with a link what moves make of schedules."""
    if judge.link is None:
        return searches
    from hybridremat.sequence.offload.search import MovesFirst

    return (MovesFirst(searches),)


def compose(
    plans: Sequence[ChainPlan],
    judge: Judge,
    progress: Progress,
    strategy: Strategy = HYBRID,
    ranges: Ranges | None = None,
    deadline: Deadline = NO_DEADLINE,
) -> Pool:
    """All chains' points that the judge allows, each with its chain; thin outside of given ``ranges``.

    Nothing in it needs less than the least of its base.

    Raises
    ------
    PolicyError
        If no schedule that was found obeys the pins.
    """
    strategy = strategy.for_saved() if judge.saved_counts else strategy
    every: list[Pool] = []
    for index, plan in enumerate(plans):
        if every and deadline.passed:
            break
        progress("composing", index, len(plans))
        of_chain = replace(judge, graph=plan.chain.graph)
        found = strategy.frontier(
            plan.chain, plan.bindings, plan.option_sets, of_chain, Wanted(ranges, deadline)
        )
        if any(op.variant for op in plan.chain.graph.ops):
            found = found.mapped(PartsChooser(of_chain))

        def allowed(point: SchedulePoint, chain: int = index) -> Iterator[SchedulePoint]:
            if judge.allows(point.schedule):
                yield replace(point, chain=chain)

        every.append(found.mapped(allowed))
    pool = Pool.merged(every)
    if not pool.points:
        raise PolicyError("policy: no schedule of this step was found that does as it says; pin less")
    base = pool.base or pool.points
    reported = (each for each in (*pool.points, *base) if each.needs >= base[0].needs)
    return judge.pool(reported, base)


