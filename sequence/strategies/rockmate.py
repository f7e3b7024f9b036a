"""``rockmate``: Rotor over the chain, with the options that a grid of memory budgets gives for each block.

Zhao, Le Hellard, Eyraud-Dubois, Gusak and Beaumont, "Rockmate: an efficient, fast, automatic and generic tool
for re-materialization in PyTorch" (ICML 2023): for each block a Checkmate-like program is solved for a few
budgets of what is saved and of the peak. Here the Pareto set of each block is known, and of it the fastest
option under each pair of budgets is taken, 4 of bytes saved by 6 of peaks, evenly between the least and the
most that any option takes. Blocks that run again from their input use these options as well; options that do
not even make the block's output are this tool's own, and left out. Optimal for the options of the grid, as
Rotor is.
"""

from __future__ import annotations

from typing import Final

from hybridremat.blocks.types import Option, OptionSet
from hybridremat.sequence.strategies.strategy import Strategy

SAVED_BUDGETS: Final = 4
PEAK_BUDGETS: Final = 6


def on_grid(options: OptionSet) -> OptionSet:
    """The options that the budgets of the grid give."""
    found: dict[Option, None] = {}
    for saved in _budgets([each.saved_bytes for each in options.options], SAVED_BUDGETS):
        for peak in _budgets([_peak(each) for each in options.options], PEAK_BUDGETS):
            fitting = [each for each in options.options if each.saved_bytes <= saved and _peak(each) <= peak]
            if fitting:
                found[min(fitting, key=lambda each: (each.time, each.saved_bytes, _peak(each)))] = None
    return OptionSet(tuple(found), (), options.solves, options.unproved)


def _peak(option: Option) -> int:
    return max(option.forward_peak, option.backward_peak)


def _budgets(bytes_: list[int], count: int) -> list[int]:
    least, most = min(bytes_), max(bytes_)
    return [least + (most - least) * step // (count - 1) for step in range(count)]


ROCKMATE: Final = Strategy("rockmate", on_grid)
