"""The request that a plan answers: every setting that it depends on, in one record."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from hybridremat.blocks.types import BlockSolver
from hybridremat.graph.costs.cost_models import CostModel
from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.graph.costs.untried import Untried
from hybridremat.plans.fsdp import Fsdp
from hybridremat.plans.policy import Policy
from hybridremat.sequence.outside_memory import OutsideMemory
from hybridremat.units import parse_bytes

GradOutputs = Literal["auto", "all"]
OnInfeasible = Literal["error", "least"]
Gathers = Literal["keep", "plan"]
GraphBreaks = Literal["auto", "error", "plan"]
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
    "layers-lp",
    "offload-all",
    "offload-inputs",
]
MOVING: Final[Sequence[StrategyName]] = ("offload-all", "offload-inputs")
"""Strategies that make nothing but moves: without ``offload=`` there is nowhere to."""

AnyCostModel = str | CostModel
AnyDevice = str | Path | DeviceSpec | None
AnyFsdp = int | Fsdp | None

# ``follows``: a plan that is given brings it, for later input shapes too; ``same``: and another one beside
# ``plan=`` is an error. ``option``: the parsed option of the command line, if it has another name.
_FOLLOWS: Mapping[str, Any] = {"follows": True}
_SAME: Mapping[str, Any] = {"follows": True, "same": True}


@dataclass(frozen=True, kw_only=True)
class Request:
    """The settings of :func:`hybridremat.wrap` that a plan depends on, as the caller wrote them.

    A plan and its file hold all of them, ``reserve`` and ``host_memory_limit`` in bytes, ``cost_model`` by
    its name and ``device_spec`` by its figures. The plan cache and ranks compare them.

    ``reckoning`` says how ``memory_limit="auto"`` was computed (``runtime/auto_limit.py``); ``granted`` are
    the bytes that a share came to for the largest input shape so far: a smaller shape may take as many.
    """

    memory_limit: int | str | None = field(default=None, metadata={**_FOLLOWS, "option": "limit"})
    max_overhead: float | str | None = field(default=None, metadata=_FOLLOWS)
    reserve: int | str = field(default=0, metadata=_SAME)
    cost_model: AnyCostModel = "profile"
    hold_outputs: bool = field(default=False, metadata=_SAME)
    grad_outputs: GradOutputs = field(default="auto", metadata=_SAME)
    forwards: int = field(default=1, metadata=_SAME)
    on_infeasible: OnInfeasible = "error"
    graph_breaks: GraphBreaks = field(default="auto", metadata=_FOLLOWS)
    units: tuple[str, ...] = field(default=(), metadata=_SAME)
    fsdp: AnyFsdp = field(default=None, metadata=_SAME)
    gathers: Gathers = field(default="keep", metadata=_SAME)
    reckoning: str = field(default="", metadata=_FOLLOWS)
    granted: int = 0
    device_spec: AnyDevice = None
    policy: Policy | None = field(default=None, metadata={**_FOLLOWS, "option": "pin"}, hash=False)
    compiler: Compiler = field(default="eager", metadata=_SAME)
    rewrites: Rewrites = field(default="exact", metadata=_SAME)
    gradients: Gradients = field(default="at_end", metadata=_SAME)
    outputs: Outputs = field(default="all", metadata=_SAME)
    strategy: StrategyName = field(default="hybrid", metadata=_SAME)
    offload: str | None = field(default=None, metadata=_FOLLOWS)
    host_memory_limit: int | str | None = field(default=None, metadata=_FOLLOWS)
    block_solver: BlockSolver = "auto"
    planning_budget: float | str | None = None
    untried: Untried = "error"

    @property
    def several_graphs(self) -> bool:
        """Whether a step may come in several graphs."""
        return self.graph_breaks == "plan" or bool(self.units)

    def reserve_bytes(self) -> int:
        """``reserve`` in bytes."""
        return parse_bytes(self.reserve, name="reserve")

    def host_bytes(self) -> int:
        """``host_memory_limit`` in bytes; by default half of the memory that is installed here."""
        if self.host_memory_limit is None:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        return parse_bytes(self.host_memory_limit, name="host_memory_limit")

    def outside_memory(self) -> OutsideMemory:
        """``reserve`` and ``forwards``."""
        return OutsideMemory(self.reserve_bytes(), self.forwards)
