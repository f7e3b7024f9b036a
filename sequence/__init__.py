"""The chain of blocks: a dynamic program over the options of its blocks, and its frontier.

:func:`frontier` is the way in: chain, bindings and option sets to a Pareto set of exact schedules. Its
stages stand alone: :func:`chain_problem`, :func:`chain_table`, :class:`Rebuilder`, :class:`Flattener`.
"""

from hybridremat.sequence.compare import per_block_checkpoint
from hybridremat.sequence.dead import DeadRemover
from hybridremat.sequence.decisions import (
    Backward,
    BlockDecision,
    Decision,
    Forward,
    ForwardOption,
    Solo,
    block_decisions,
)
from hybridremat.sequence.dynamic import ChainTable, chain_table
from hybridremat.sequence.flatten import Flattener
from hybridremat.sequence.frontier import SchedulePoint, frontier, merge_frontiers, schedule_point
from hybridremat.sequence.mend import Mender
from hybridremat.sequence.problem import BlockFigures, ChainProblem, OptionFigures, SoloFigures, chain_problem
from hybridremat.sequence.rebuild import InfeasibleSlotError, Rebuilder

__all__ = [
    "Backward",
    "BlockDecision",
    "BlockFigures",
    "ChainProblem",
    "ChainTable",
    "DeadRemover",
    "Decision",
    "Flattener",
    "Forward",
    "ForwardOption",
    "InfeasibleSlotError",
    "Mender",
    "OptionFigures",
    "Rebuilder",
    "SchedulePoint",
    "Solo",
    "SoloFigures",
    "block_decisions",
    "chain_problem",
    "chain_table",
    "frontier",
    "merge_frontiers",
    "per_block_checkpoint",
    "schedule_point",
]
