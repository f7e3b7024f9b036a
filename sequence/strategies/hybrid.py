"""``hybrid``, the default: all Pareto options of each block, composed by the chain's dynamic program.

docs/method.md describes it. In exact bytes no strategy with some of these options can be better; in slots of
memory the program takes some schedules for dominated that are not. So it runs once more with the options of
Rockmate's grid: on the reference models these alone found something that it had lost. What is chosen is then
improved without regard to blocks (:mod:`hybridremat.sequence.exchange`).
"""

from __future__ import annotations

from typing import Final

from hybridremat.sequence.strategies.rockmate import on_grid
from hybridremat.sequence.strategies.strategy import Strategy, every_option

HYBRID: Final = Strategy("hybrid", every_option, rivals=(on_grid,), exchanges=True)
