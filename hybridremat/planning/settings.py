"""The settings of a planning call, and their validation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, cast, get_args

from hybridremat.blocks.types import BlockSolver
from hybridremat.errors import LimitError
from hybridremat.graph.costs.cost_models import CostModel, cost_model
from hybridremat.graph.costs.device_specs import DeviceSpec, device_spec
from hybridremat.graph.costs.untried import Untried
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.policy import Policy, policy_of, validated_policy
from hybridremat.plans.records import Request
from hybridremat.sequence.outside_memory import OutsideMemory
from hybridremat.units import (
    is_share,
    parse_bytes,
    parse_overhead,
    parse_seconds,
    require_count,
    resolve_limit,
)

GradOutputs = Literal["auto", "all"]
OnInfeasible = Literal["error", "least"]
GraphBreaks = Literal["error", "plan"]
Compiler = Literal["eager", "inductor"]
Rewrites = Literal["exact", "chunked", "none"]
Outputs = Literal["all", "loss"]
Gradients = Literal["at_end", "in_backward"]
StrategyName = Literal[
    "hybrid",
    "plain",
    "sqrt",
    "every-block",
    "min-peak",
    "rotor",
    "rockmate",
    "checkmate",
    "checkmate-lp",
]


class CommonSettings(TypedDict, total=False):
    """Keywords of all planning; see :func:`hybridremat.wrap`."""

    cost_model: str | CostModel
    hold_outputs: bool
    grad_outputs: GradOutputs
    workers: int | None
    cache: bool
    policy: Policy | None
    compiler: Compiler
    rewrites: Rewrites
    gradients: Gradients
    outputs: Outputs
    graph_breaks: GraphBreaks
    strategy: StrategyName
    block_solver: BlockSolver
    planning_budget: float | str | None
    untried: Untried


class WrapSettings(CommonSettings, total=False):
    """Keywords of :func:`hybridremat.wrap` that say what to plan."""

    memory_limit: int | str | None
    max_overhead: float | str | None
    reserve: int | str
    forwards: int
    on_infeasible: OnInfeasible
    max_plans: int


class _Elsewhere(TypedDict, total=False):
    device_spec: str | Path | DeviceSpec | None


class BatchSettings(CommonSettings, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.max_batch_size` and :func:`hybridremat.fit`."""

    max_overhead: float | str | None
    reserve: int | str
    forwards: int


class PlanSettings(WrapSettings, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.plan`: what runs nowhere can be planned for any device."""


class FrontierSettings(CommonSettings, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.frontier`."""


# Fields of Settings. ``decides``: plans depend on it, so it is part of a plan's key on disk and of what ranks
# compare. ``of_wrap``: it is a keyword of wrap. ``option``: the parsed option of the command line, if it has
# another name. ``of_plan``: a given plan brings its own, so it must not differ beside ``plan=``.
_DECIDES = {"decides": True, "of_wrap": True}
_OF_PLAN = {"decides": True, "of_wrap": True, "of_plan": True}
_HOW = {"decides": False, "of_wrap": True}
_NOT_OF_WRAP = {"decides": True, "of_wrap": False}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of :func:`hybridremat.wrap`, which describes each of them.

    ``reckoning`` says how ``memory_limit="auto"`` was computed (``runtime/auto_limit.py``); ``granted`` are
    the bytes that a share came to for the largest input shape so far: a smaller shape may take as many.
    """

    memory_limit: int | str | None = field(default=None, metadata=_DECIDES | {"option": "limit"})
    max_overhead: float | str | None = field(default=None, metadata=_DECIDES)
    reserve: int | str = field(default=0, metadata=_OF_PLAN)
    cost_model: str | CostModel = field(default="profile", metadata=_DECIDES)
    hold_outputs: bool = field(default=False, metadata=_OF_PLAN)
    grad_outputs: GradOutputs = field(default="auto", metadata=_OF_PLAN)
    forwards: int = field(default=1, metadata=_OF_PLAN)
    on_infeasible: OnInfeasible = field(default="error", metadata=_DECIDES)
    max_plans: int = field(default=64, metadata=_HOW)
    graph_breaks: GraphBreaks = field(default="error", metadata=_DECIDES)
    workers: int | None = field(default=None, metadata=_HOW)
    cache: bool = field(default=True, metadata=_HOW | {"option": "no_cache"})
    reckoning: str = field(default="", metadata=_NOT_OF_WRAP)
    granted: int = field(default=0, metadata=_NOT_OF_WRAP)
    device_spec: str | Path | DeviceSpec | None = field(default=None, metadata=_NOT_OF_WRAP)
    policy: Policy | None = field(default=None, metadata=_DECIDES | {"option": "pin"})
    compiler: Compiler = field(default="eager", metadata=_OF_PLAN)
    rewrites: Rewrites = field(default="exact", metadata=_OF_PLAN)
    gradients: Gradients = field(default="at_end", metadata=_OF_PLAN)
    outputs: Outputs = field(default="all", metadata=_OF_PLAN)
    strategy: StrategyName = field(default="hybrid", metadata=_OF_PLAN)
    block_solver: BlockSolver = field(default="auto", metadata=_DECIDES)
    planning_budget: float | str | None = field(default=None, metadata=_DECIDES)
    untried: Untried = field(default="error", metadata=_DECIDES)

    def __post_init__(self) -> None:
        if isinstance(self.policy, Mapping):  # later shapes use this copy
            object.__setattr__(self, "policy", dict(self.policy))
        for name in ("memory_limit", "reserve", "forwards", "max_plans", "workers"):  # numpy's, for one
            number = getattr(self, name)
            if not isinstance(number, bool) and isinstance(number, Integral):
                object.__setattr__(self, name, int(number))

    def validated(self, *, need_limit: bool) -> Settings:
        """These settings, or a typed error about the first one that cannot be used.

        Raises
        ------
        LimitError
            For a value out of range, settings that exclude each other, or neither limit nor overhead.
        CostModelError
            For an unknown cost model.
        PolicyError
            For a policy that is no mapping of patterns to actions.
        DeviceSpecError
            For a device that is not known, or whose file cannot be read.
        """
        if self.memory_limit is not None:
            resolve_limit(self.memory_limit, 1 << 40)
        elif need_limit and self.max_overhead is None:
            raise LimitError(
                'neither memory_limit nor max_overhead is given; pass memory_limit="6GiB" or "50%" '
                "(of the plain step's memory) or max_overhead=0.1 (least memory at 10 % more time)"
            )
        if self.max_overhead is not None:
            parse_overhead(self.max_overhead)
        self.reserve_bytes()
        cost_model(self.cost_model)
        require_count("forwards", self.forwards, "of forwards that wait for their backward at one time")
        require_count("max_plans", self.max_plans, "of input shapes")
        if self.workers is not None:
            require_count("workers", self.workers, "of processes, or None")
        if self.policy is not None:
            validated_policy(self.policy)
        _one_of("grad_outputs", self.grad_outputs, get_args(GradOutputs))
        _one_of("on_infeasible", self.on_infeasible, get_args(OnInfeasible))
        _one_of("graph_breaks", self.graph_breaks, get_args(GraphBreaks))
        _one_of("compiler", self.compiler, get_args(Compiler))
        _one_of("rewrites", self.rewrites, get_args(Rewrites))
        _one_of("gradients", self.gradients, get_args(Gradients))
        _one_of("outputs", self.outputs, get_args(Outputs))
        _one_of("strategy", self.strategy, get_args(StrategyName))
        _one_of("block_solver", self.block_solver, get_args(BlockSolver))
        _one_of("untried", self.untried, get_args(Untried))
        self.budget_seconds()
        self._require_early_gradients()
        self._require_one_loss()
        self._require_chunks()
        self._require_compilable()
        return self if self.device_spec is None else self._for_device(device_spec(self.device_spec))

    def _require_early_gradients(self) -> None:
        """Refuse what cannot be combined with gradients that leave in the backward."""
        if self.gradients == "at_end":
            return
        others = [
            (f"forwards={self.forwards}", self.forwards > 1, "plan the pair as one model that takes both"),
        ]
        for name, given, instead in others:
            if given:
                raise LimitError(
                    f'gradients="in_backward" and {name} cannot be combined: {instead}, or leave gradients= '
                    "out"
                )

    def _require_one_loss(self) -> None:
        """Refuse what needs other outputs than the loss, if they are not returned."""
        if self.outputs == "all":
            return
        for name, given in (
            ('grad_outputs="all"', self.grad_outputs == "all"),
            ("hold_outputs=True", self.hold_outputs),
        ):
            if given:
                raise LimitError(
                    f'outputs="loss" and {name} cannot be combined: leave one of them out'
                )

    def _require_chunks(self) -> None:
        """Refuse what cannot be combined with losses by chunks of rows."""
        if self.rewrites != "chunked":
            return
        for name, given in (
            ('grad_outputs="all"', self.grad_outputs == "all"),
        ):
            if given:
                raise LimitError(
                    f'rewrites="chunked" and {name} cannot be combined: leave one of them out'
                )

    def _require_compilable(self) -> None:
        """Refuse what cannot be combined with Inductor."""
        if self.compiler == "inductor" and self.device_spec is not None:
            raise LimitError(
                'compiler="inductor" and device_spec= cannot be combined: what Inductor makes of a step is '
                "known where it is compiled. Plan on that device, or leave compiler= out"
            )

    def _for_device(self, spec: DeviceSpec) -> Settings:
        if self.graph_breaks == "plan":
            raise LimitError(
                f'device_spec={spec.name!r} and graph_breaks="plan" cannot be combined: what runs between '
                "graphs is measured here. Remove the breaks, or plan on that device"
            )
        return replace(self, device_spec=spec)

    @property
    def spec(self) -> DeviceSpec | None:
        """The device spec to plan for, if any; of validated settings."""
        return self.device_spec if isinstance(self.device_spec, DeviceSpec) else None

    def costs(self) -> CostModel:
        """The source of times; with a device spec, the roofline of its rates in place of measurements."""
        if self.spec is not None and self.cost_model in ("profile", "roofline"):
            from hybridremat.graph.costs.spec_costs import SpecCost

            return SpecCost(self.spec)
        return cost_model(self.cost_model)

    def deciding(self) -> tuple[tuple[str, object], ...]:
        """Name and value of every setting that plans depend on; a cost model is given by its name."""
        asked = ((item.name, getattr(self, item.name)) for item in fields(self) if item.metadata["decides"])
        return tuple(
            (name, cost_model(value).name if name == "cost_model" else value) for name, value in asked
        )

    def request(self) -> Request:
        """What a plan records of these settings."""
        return Request(
            memory_limit=self.memory_limit,
            max_overhead=self.max_overhead,
            hold_outputs=self.hold_outputs,
            grad_outputs=self.grad_outputs,
            reckoning=self.reckoning,
            rewrites=self.rewrites,
            gradients=self.gradients,
            outputs=self.outputs,
            strategy=self.strategy,
        )

    def following(self, plan: PlanData) -> Settings:
        """These settings with what ``plan`` was asked for."""
        return replace(
            self,
            memory_limit=plan.request.memory_limit,
            max_overhead=plan.request.max_overhead,
            hold_outputs=plan.request.hold_outputs,
            grad_outputs=cast(GradOutputs, plan.request.grad_outputs),
            policy=policy_of(plan),
            reserve=plan.reserve,
            forwards=plan.forwards,
            reckoning=plan.request.reckoning,
            compiler=cast(Compiler, plan.compiler),
            rewrites=cast(Rewrites, plan.request.rewrites),
            gradients=cast(Gradients, plan.request.gradients),
            outputs=cast(Outputs, plan.request.outputs),
            strategy=cast(StrategyName, plan.request.strategy),
            graph_breaks="plan" if plan.parts else self.graph_breaks,
        )

    def reserve_bytes(self) -> int:
        """``reserve`` in bytes."""
        return parse_bytes(self.reserve, name="reserve")

    def outside_memory(self) -> OutsideMemory:
        """``reserve`` and ``forwards``."""
        return OutsideMemory(self.reserve_bytes(), self.forwards)

    def budget_seconds(self) -> float | None:
        """``planning_budget`` in seconds; None if searches go by counts of work."""
        if self.planning_budget in (None, UNLIMITED):
            return None
        return parse_seconds(self.planning_budget, name="planning_budget", other=f'or "{UNLIMITED}"')

    def capability(self) -> int | None:
        """The compute capability of the device that is not here; None where a plan is for this one."""
        return None if self.spec is None else self.spec.capability

    def overhead_limit(self) -> float | None:
        """``max_overhead`` as a fraction."""
        return None if self.max_overhead is None else parse_overhead(self.max_overhead)

    def limit_bytes(self, plain_peak: int, *, least: int = 1) -> int | None:
        """``memory_limit`` in bytes, for a plain step of ``plain_peak`` bytes.

        Raises
        ------
        LimitError
            If a share comes to fewer than ``least`` bytes.
        """
        if self.memory_limit is None:
            return None
        granted = self.granted if is_share(self.memory_limit) else 0
        resolved = resolve_limit(self.memory_limit, plain_peak, least=0 if granted else least)
        return max(granted, resolved)


UNLIMITED: Final = "unlimited"
"""The ``planning_budget`` of searches that go on to caps of their own."""

SETTING_NAMES: tuple[str, ...] = tuple(item.name for item in fields(Settings) if item.metadata["of_wrap"])
"""The settings that are keywords of ``wrap``."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A sentence with the known name nearest to an unknown one, or nothing."""
    near = [each for each in known if name in each.split("_")]
    near = near or get_close_matches(name, known, n=1, cutoff=0.5)
    return f". Did you mean {near[0]!r}?" if near else ""


def settings_of(function: str, keywords: Collection[str], given: Mapping[str, Any]) -> Settings:
    """The settings that a function with these keywords was called with.

    Raises
    ------
    TypeError
        For an unknown name.
    """
    for name in given:
        if name not in keywords:
            raise TypeError(
                f"{function}() got an unexpected keyword argument {name!r}{did_you_mean(name, keywords)}"
            )
    return Settings(**given)


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LimitError(f"{name}={value!r} is not known; use {' or '.join(map(repr, known))}")
