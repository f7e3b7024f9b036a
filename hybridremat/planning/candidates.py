"""What a frontier consists of: chains with their options, and points that these led to."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.segmentation.chain import Chain
from hybridremat.sequence.frontier import SchedulePoint


@dataclass(frozen=True)
class ChainPlan:
    """One segmentation with the options of its blocks."""

    chain: Chain
    bindings: tuple[BlockBinding, ...]
    option_sets: tuple[OptionSet, ...]


@dataclass(frozen=True)
class Candidate:
    """One point of the frontier; ``chain_index`` is the chain of its decisions, None without any."""

    point: SchedulePoint
    chain_index: int | None
