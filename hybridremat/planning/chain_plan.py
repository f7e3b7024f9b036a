"""A chain with the options of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from hybridremat.blocks.types import BlockBinding, OptionSet
from hybridremat.graph.segmentation.chain import Chain


@dataclass(frozen=True)
class ChainPlan:
    """One segmentation with the options of its blocks."""

    chain: Chain
    bindings: tuple[BlockBinding, ...]
    option_sets: tuple[OptionSet, ...]
