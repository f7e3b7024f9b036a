"""What the user asked for, validated before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypedDict, cast, get_args

from hybridremat.errors import LimitError
from hybridremat.graph.costs.cost_models import CostModel, cost_model
from hybridremat.graph.costs.device_specs import DeviceSpec, device_spec
from hybridremat.graph.costs.spec_costs import SpecCost
from hybridremat.plans.outside_memory import Demands
from hybridremat.plans.policy import Policy, policy_of, validated_policy
from hybridremat.plans.records import Request
from hybridremat.units import parse_bytes, parse_overhead, resolve_limit

if TYPE_CHECKING:
    from hybridremat.planning.plan import Plan

GradOutputs = Literal["auto", "all"]
OnInfeasible = Literal["error", "least"]
GraphBreaks = Literal["error", "plan"]


class AskedOfFrontier(TypedDict, total=False):
    """Keywords that decide on the frontier; see :func:`hybridremat.wrap`."""

    cost_model: str | CostModel
    hold_outputs: bool
    grad_outputs: GradOutputs
    workers: int | None
    cache: bool
    policy: Policy | None


class AskedOfBatch(AskedOfFrontier, total=False):
    """Keywords of the search for a batch size; see :func:`hybridremat.max_batch_size`."""

    max_overhead: float | str | None
    reserve: int | str
    forwards: int


class Asked(AskedOfFrontier, total=False):
    """Keywords of a plan, the fields of :class:`Settings`; see :func:`hybridremat.wrap`."""

    memory_limit: int | str | None
    max_overhead: float | str | None
    reserve: int | str
    forwards: int
    on_infeasible: OnInfeasible
    max_plans: int
    graph_breaks: GraphBreaks


class _Elsewhere(TypedDict, total=False):
    device_spec: str | Path | DeviceSpec | None


class AskedOfPlan(Asked, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.plan`: what runs nowhere can be planned for any device."""


class AskedOfCurve(AskedOfFrontier, _Elsewhere, total=False):
    """Keywords of :func:`hybridremat.frontier`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A planning request. See :func:`hybridremat.wrap` for the meaning of each field.

    ``reckoning`` says where a limit comes from that is not the caller's (``runtime/auto_limit.py``).
    """

    memory_limit: int | str | None = None
    max_overhead: float | str | None = None
    reserve: int | str = 0
    cost_model: str | CostModel = "profile"
    hold_outputs: bool = False
    grad_outputs: GradOutputs = "auto"
    forwards: int = 1
    on_infeasible: OnInfeasible = "error"
    max_plans: int = 64
    graph_breaks: GraphBreaks = "error"
    workers: int | None = None
    cache: bool = True
    reckoning: str = ""
    device_spec: str | Path | DeviceSpec | None = None
    policy: Policy | None = None

    def __post_init__(self) -> None:
        if isinstance(self.policy, Mapping):  # later shapes are planned with what was said now
            object.__setattr__(self, "policy", dict(self.policy))

    def validated(self, *, need_limit: bool) -> Settings:
        """These settings, or a typed error about the first one that cannot be used.

        Raises
        ------
        LimitError
            For a malformed limit, overhead or reserve, or neither limit nor overhead.
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
                'neither memory_limit nor max_overhead is given; pass memory_limit="6GiB", '
                'memory_limit="50%" '
                "(of the plain step's memory) or max_overhead=0.1 (least memory at 10 % more time)"
            )
        if self.max_overhead is not None:
            parse_overhead(self.max_overhead)
        self.reserve_bytes()
        cost_model(self.cost_model)
        _positive("forwards", self.forwards, "of forwards that wait for their backward at one time")
        _positive("max_plans", self.max_plans, "of input shapes")
        if self.workers is not None:
            _positive("workers", self.workers, "of processes, or None")
        if self.policy is not None:
            validated_policy(self.policy)
        _one_of("grad_outputs", self.grad_outputs, get_args(GradOutputs))
        _one_of("on_infeasible", self.on_infeasible, get_args(OnInfeasible))
        _one_of("graph_breaks", self.graph_breaks, get_args(GraphBreaks))
        if self.graph_breaks == "plan" and self.forwards > 1:
            raise LimitError(
                f'forwards={self.forwards} and graph_breaks="plan" cannot be combined: plan the pair as one '
                "model that takes both inputs, or remove the breaks"
            )
        return self if self.device_spec is None else self._for_device(device_spec(self.device_spec))

    def _for_device(self, spec: DeviceSpec) -> Settings:
        """These settings with the device read: what a file says may change, a request does not."""
        if self.graph_breaks == "plan":
            raise LimitError(
                f'device_spec={spec.name!r} and graph_breaks="plan" cannot be combined: what runs between '
                "graphs is measured here. Remove the breaks, or plan on that device"
            )
        return replace(self, device_spec=spec)

    @property
    def spec(self) -> DeviceSpec | None:
        """The device that is planned for, if it is another than the one here; of validated settings."""
        return self.device_spec if isinstance(self.device_spec, DeviceSpec) else None

    def costs(self) -> CostModel:
        """The source of times. Where nothing can be timed, that is the roofline of the device's rates."""
        if self.spec is not None and self.cost_model in ("profile", "roofline"):
            return SpecCost(self.spec)
        return cost_model(self.cost_model)

    def request(self) -> Request:
        """What a plan records of these settings."""
        return Request(
            self.memory_limit, self.max_overhead, self.hold_outputs, self.grad_outputs, self.reckoning
        )

    def following(self, plan: Plan) -> Settings:
        """These settings, but what is asked is what ``plan`` was made for."""
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
        )

    def reserve_bytes(self) -> int:
        """Bytes kept free for the caller's own code once the forward is over."""
        return parse_bytes(self.reserve, name="reserve")

    def demands(self) -> Demands:
        """What the caller does beyond one forward and its backward."""
        return Demands(self.reserve_bytes(), self.forwards)

    def overhead_limit(self) -> float | None:
        """Most overhead as a fraction, or None."""
        return None if self.max_overhead is None else parse_overhead(self.max_overhead)

    def limit_bytes(self, plain_peak: int) -> int | None:
        """The memory limit in bytes, or None."""
        return None if self.memory_limit is None else resolve_limit(self.memory_limit, plain_peak)


#: What a caller of ``wrap`` may name: not what is found out, nor another device than the one that runs it.
SETTING_NAMES: tuple[str, ...] = tuple(
    item.name for item in fields(Settings) if item.name not in ("reckoning", "device_spec")
)


def _positive(name: str, value: object, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LimitError(f"{name}={value!r} is out of range: give a number ≥ 1 {what}")


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise LimitError(f"{name}={value!r} is not known; use {' or '.join(map(repr, known))}")
