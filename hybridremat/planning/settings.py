"""The settings of a planning call, and their validation."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any, Final, Literal, TypedDict, get_args, get_origin, get_type_hints

from hybridremat.blocks.types import BlockSolver
from hybridremat.errors import LimitError, OffloadError
from hybridremat.graph.costs.cost_models import CostModel, cost_model
from hybridremat.graph.costs.device_specs import DeviceSpec, device_spec
from hybridremat.graph.costs.untried import Untried
from hybridremat.plans.fsdp import Fsdp
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.policy import Policy, validated_policy
from hybridremat.plans.request import (
    MOVING,
    AnyCostModel,
    AnyDevice,
    AnyFsdp,
    Compiler,
    Gathers,
    Gradients,
    GradOutputs,
    GraphBreaks,
    Outputs,
    Request,
    Rewrites,
    StrategyName,
)
from hybridremat.plans.request import OnInfeasible as OnInfeasible  # asked for by its name here as well
from hybridremat.units import is_share, parse_overhead, parse_seconds, require_count, resolve_limit


class CommonSettings(TypedDict, total=False):
    """Keywords of all planning; see :func:`hybridremat.wrap`."""

    cost_model: AnyCostModel
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
    units: str | Sequence[str]
    fsdp: AnyFsdp
    gathers: Gathers
    strategy: StrategyName
    block_solver: BlockSolver
    planning_budget: float | str | None
    untried: Untried
    offload: str | None
    host_memory_limit: int | str | None


class StepSettings(CommonSettings, total=False):
    """Keywords of :func:`hybridremat.wrap` that say what to plan, beside the limit and the overhead."""

    reserve: int | str
    forwards: int
    on_infeasible: OnInfeasible
    max_plans: int
    dynamic: bool | None


class WrapSettings(StepSettings, total=False):
    """Keywords of :func:`hybridremat.wrap` that say what to plan."""

    memory_limit: int | str | None
    max_overhead: float | str | None


class _Elsewhere(TypedDict, total=False):
    device_spec: AnyDevice


class BatchSettings(CommonSettings, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.max_batch_size` and :func:`hybridremat.fit`."""

    dynamic: bool | None
    max_overhead: float | str | None
    reserve: int | str
    forwards: int


class PlanSettings(WrapSettings, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.plan`: what runs nowhere can be planned for any device."""


class PipelineSettings(TypedDict, total=False):
    """Keywords of :func:`hybridremat.pipeline_plan` that say how its stages are planned."""

    cost_model: AnyCostModel
    device_spec: AnyDevice
    rewrites: Rewrites
    strategy: StrategyName
    block_solver: BlockSolver
    planning_budget: float | str | None
    untried: Untried
    workers: int | None
    cache: bool


class FrontierSettings(CommonSettings, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.frontier`."""

    dynamic: bool | None


@dataclass(frozen=True, kw_only=True)
class Settings(Request):
    """Settings of :func:`hybridremat.wrap`, which describes each of them: the request, and how to plan it.

    ``own_units``: whether what runs between graphs may become units; no keyword of ``wrap``.
    """

    max_plans: int = 64
    dynamic: bool | None = None
    workers: int | None = None
    cache: bool = field(default=True, metadata={"option": "no_cache"})
    own_units: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.policy, Mapping):  # later shapes use this copy
            object.__setattr__(self, "policy", dict(self.policy))
        units: Any = self.units  # as a caller writes them
        several = isinstance(units, Iterable) and not isinstance(units, (str, bytes))
        units = () if units is None else tuple(units) if several else (units,)
        object.__setattr__(self, "units", units)
        for item in fields(self):  # numbers of numpy, for one, are no JSON
            number = getattr(self, item.name)
            if not isinstance(number, (bool, int, float)) and isinstance(number, Real):
                plain = int(number) if isinstance(number, Integral) else float(number)
                object.__setattr__(self, item.name, plain)

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
        OffloadError
            If values cannot wait where ``offload`` says, or it says nothing and the strategy moves them.
        """
        if self.memory_limit is not None:
            resolve_limit(self.memory_limit, 1 << 40)
        elif need_limit and self.max_overhead is None:
            raise LimitError(
                'neither memory_limit nor max_overhead is given; pass memory_limit="6GiB" or "50%" '
                "(of the plain step's memory) or max_overhead=0.1 (least memory at 10 % more time)"
            )
        if not all(isinstance(each, str) and each for each in self.units):
            raise LimitError(f'units={self.units!r} are no names of modules; pass units="layers.*", for one')
        self.overhead_limit()
        self.reserve_bytes()
        cost_model(self.cost_model)
        require_count("forwards", self.forwards, "of forwards that wait for their backward at one time")
        require_count("max_plans", self.max_plans, "of input shapes")
        if self.workers is not None:
            require_count("workers", self.workers, "of processes, or None")
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise LimitError(f"dynamic={self.dynamic!r} is not known; use None, True or False")
        if self.policy is not None:
            validated_policy(self.policy)
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise LimitError(
                    f"{name}={getattr(self, name)!r} is not known; use {' or '.join(map(repr, known))}"
                )
        self.budget_seconds()
        checked = replace(self, device_spec=self._device(), offload=self._away(), fsdp=self._sharding())
        for first, second, why in REFUSED_PAIRS:
            if (one := checked._given(first)) and (other := checked._given(second)):
                raise LimitError(f"{one} and {other} cannot be combined: {why}")
        return checked

    def _away(self) -> str | None:
        """``offload`` with its whole path."""
        self.host_bytes()
        if self.strategy in MOVING and self.offload is None:
            raise OffloadError(
                f'strategy="{self.strategy}" moves values, and offload= does not say where to: pass '
                'offload="host" on a GPU, offload="file:FOLDER" on the CPU, or another strategy'
            )
        if self.offload is None:
            return None
        from hybridremat.compiler.offload.targets import Target

        return str(Target.of(self.offload))

    def one_capture_refused(self) -> str:
        """The setting for which each input shape is captured by itself; empty if there is none."""
        return next(filter(None, map(self._given, BY_SHAPE)), "")

    def _given(self, setting: str) -> str:
        """A setting of :data:`REFUSED_PAIRS` with its value; empty if it is not given."""
        name, _, wanted = setting.partition("=")
        value = getattr(self, name)
        if wanted:
            return setting if str(value) == wanted.strip('"') else ""
        shown = value.name if isinstance(value, DeviceSpec) else value
        return f"{name}={shown!r}" if value != _DEFAULTS[name] else ""

    @property
    def sharding(self) -> Fsdp | None:
        """``fsdp`` as a record; None where parameters are whole."""
        return Fsdp.of(self.fsdp)

    def _sharding(self) -> Fsdp | None:
        """``fsdp`` as a record, checked."""
        found = self.sharding
        if found is None:
            return None
        if not self.units:
            raise LimitError(
                f"fsdp={found.ranks} says how fully_shard splits parameters of units, and none are named: "
                'call hybridremat.wrap_each(model, "layers.*", …), for one, with what you shard'
            )
        return found.validated()

    def _device(self) -> DeviceSpec | None:
        return None if self.device_spec is None else device_spec(self.device_spec)

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

    def request(self) -> Request:
        """All that a plan depends on, as it is stored with one and compared."""
        stored: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(Request)}
        stored["cost_model"] = cost_model(self.cost_model).name
        stored["device_spec"], stored["fsdp"] = self._device(), self.sharding
        stored["reserve"] = self.reserve_bytes()
        if self.offload is not None:
            stored["host_memory_limit"] = self.host_bytes()
        return Request(**stored)

    def following(self, plan: PlanData) -> Settings:
        """These settings with what ``plan`` was asked for, where nothing else is given."""
        brought = {
            item.name: getattr(plan.request, item.name)
            for item in fields(Request)
            if item.metadata.get("follows") and getattr(self, item.name) == item.default
        }
        return replace(self, **brought)

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

BY_SHAPE: Final = (
    *('compiler="inductor"', 'graph_breaks="plan"', "fsdp", "units"),
    *("device_spec", 'gathers="plan"'),
)
"""Settings with which each input shape is captured by itself."""

REFUSED_PAIRS: Final = (
    (
        'gradients="in_backward"',
        "forwards",
        "plan the pair as one model that takes both, or leave gradients= out",
    ),
    ('outputs="loss"', 'grad_outputs="all"', "leave one of them out"),
    ('outputs="loss"', "hold_outputs", "leave one of them out"),
    ('rewrites="chunked"', 'grad_outputs="all"', "leave one of them out"),
    (
        'compiler="inductor"',
        "device_spec",
        "what Inductor makes of a step is known where it is compiled. Plan on that device, or leave "
        "compiler= out",
    ),
    (
        "device_spec",
        'graph_breaks="plan"',
        "what runs between graphs is measured here. Remove the breaks, or plan on that device",
    ),
    (
        "offload",
        'compiler="inductor"',
        "moves are written between ops, and Inductor makes kernels of several. Leave one of them out",
    ),
    (
        "fsdp",
        'gradients="in_backward"',
        "fully_shard takes all gradients of a unit together when they are there, and an optimizer has those "
        "of its rank once they are reduced. Leave gradients= out",
    ),
    *(
        ("dynamic=True", each, "each input shape is captured by itself there. Leave one of them out")
        for each in BY_SHAPE
    ),
)
"""Settings that cannot be combined, and what to do instead; without a value: any but the default."""

_DEFAULTS: Final = {item.name: item.default for item in fields(Settings)}
_CHOICES: Final = {
    name: get_args(hint) for name, hint in get_type_hints(Request).items() if get_origin(hint) is Literal
} | dict.fromkeys(("hold_outputs", "cache"), (True, False))
SETTING_NAMES = tuple(name for name in _DEFAULTS if name in WrapSettings.__optional_keys__)
"""The settings that are keywords of ``wrap``."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A sentence with the known name nearest to an unknown one, or nothing."""
    near = [each for each in known if name in each.split("_")]
    near = near or get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f". Did you mean {min(near, key=lambda each: (len(each), each))!r}?" if near else ""


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
