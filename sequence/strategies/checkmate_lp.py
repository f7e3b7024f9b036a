"""``checkmate-lp``: Checkmate's linear relaxation over the whole graph, rounded in two phases.

Jain et al. 2020, section 5 (the paper of ``checkmate``): relax the program, round what is kept, then run
again what this needs (:mod:`hybridremat.sequence.checkmate.rounding`). They round at one half, or at random,
and solve for 0.9 of the limit, since what is rounded may need more. Here all of these are tried: several
shares of the limit, thresholds and draws. Each schedule is simulated, and only those that keep the limit
count, so a limit is kept, and where none keeps it there is no plan. Optimal for nothing, but in polynomial
time. Graphs of more than :data:`STAGES` ops get that many stages of several ops, and rows of memory where
most is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from hybridremat.errors import GraphSizeError
from hybridremat.graph.joint import JointGraph, Schedule
from hybridremat.sequence.checkmate.program import CheckmateProgram
from hybridremat.sequence.checkmate.rounding import at_least, at_random, rounded
from hybridremat.sequence.checkmate.stages import Stages, even_stages
from hybridremat.sequence.strategies.whole_graph import Found, WholeGraph

SHARES: Final = (1.0, 0.9)
"""Of the limit, for which the relaxation is solved."""

THRESHOLDS: Final = tuple(number / 10 for number in range(1, 10))
"""What the relaxation has to keep of a value for it to be kept."""

DRAWS: Final = 20
"""Random roundings of each relaxation."""

STAGES: Final = 60
"""Most stages: twice as many took twice as long on GPT-2, for little."""

TERMS: Final = 1_000_000
"""In the rows of memory, at most: some seconds of solving."""

ITERATIONS: Final = 3_000
"""Of the solver: what is rounded needs no more digits."""

MOST_OPS: Final = 20_000
"""Stages of more ops than that do not fit what is rounded."""

WIDER: Final = (1.0, 1.05, 1.1, 1.2, 1.4)
"""Of the relaxation's least peak: limits for which roundings are looked at for the least."""


class Roundings:
    """The search in one graph, in stages of its own unless others are given."""

    def __init__(self, graph: JointGraph, stages: Stages | None = None) -> None:
        if len(graph.ops) > MOST_OPS:
            raise GraphSizeError(
                f'strategy="checkmate-lp" takes up to {MOST_OPS:,} ops, and this graph has '
                f'{len(graph.ops):,}: use strategy="hybrid"'
            )
        self._stages = stages or even_stages(graph, STAGES)

    def under(self, limit: int) -> Found:
        """See :class:`~hybridremat.sequence.strategies.whole_graph.Search`."""
        programs = (CheckmateProgram(self._stages, int(share * limit), most_terms=TERMS) for share in SHARES)
        return Found([each for program in programs for each in self._rounded(program)])

    def least(self, known: int) -> Found:
        """See :class:`~hybridremat.sequence.strategies.whole_graph.Search`."""
        program = CheckmateProgram(self._stages, known, least_peak=True, most_terms=TERMS)
        assert program.peak is not None
        found = list(self._rounded(program))
        least = program.program.values(ITERATIONS)[program.peak]
        for share in WIDER:
            narrow = CheckmateProgram(self._stages, int(share * least), most_terms=TERMS)
            found += self._rounded(narrow)
        return Found(found)

    def _rounded(self, program: CheckmateProgram) -> Iterator[Schedule]:
        values = program.program.values(ITERATIONS)
        kept = {each: values[variable] for each, variable in program.kept.items()}
        for share in THRESHOLDS:
            yield rounded(self._stages, at_least(share, kept))
        for seed in range(DRAWS):
            yield rounded(self._stages, at_random(seed, kept))


CHECKMATE_LP: Final = WholeGraph("checkmate-lp", Roundings)
