"""``min-peak``: the set of checkpoints of least peak, whatever it costs in time.

The problem of Hong, Tsai, Wang, Liu and Wu, "GPU memory usage optimization for backward propagation in deep
network training" (Academia Sinica and National Taiwan University, 2025), in the figures of this chain: each
checkpoint is kept from the forward until its segment has gone back, each segment is run again once, whole,
and saves all that its backward reads; which checkpoints give the least peak?

A checkpoint is there while its own segment and those behind it go back. So what a segment and all behind it
take, beside the checkpoints before, does not depend on these: with s the segment's start, t its end, and
a[s][t+1] the bytes of the next checkpoint,

    peak(s) = min over t of max(segment(s, t), a[s][t+1] + peak(t+1)).

:func:`least_peak_cubic` counts every segment anew, in O(n³), :func:`least_peak` lets it grow with t, O(n²).
Optimal for the figures of the blocks' fastest options, which are never too low and up to a few percent too
high.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hybridremat.sequence.chain_problem import ChainProblem
from hybridremat.sequence.strategies.segments import of_segments
from hybridremat.sequence.strategies.strategy import Strategy, fastest_option


def segment_peak(problem: ChainProblem, start: int, end: int) -> int:
    """Peak of blocks start…end beside the segment's input: of both forwards and the backward, in bytes."""
    gradients = problem.gradient_bytes[end + 1] + problem.later_gradients[end]
    peak = saved = 0
    for block in range(start, end + 1):
        (option,) = problem.blocks[block].options
        peak = max(
            peak,
            problem.plain_peak[start][block],
            saved + option.forward_peak + gradients,
            saved + option.backward_peak + problem.later_gradients[block],
        )
        saved += option.saved
    return peak


def least_peak_cubic(problem: ChainProblem) -> tuple[int, tuple[int, ...]]:
    """The least peak in bytes, without what is alive at any time, and the segments' starts."""

    def peaks(start: int) -> list[int]:
        return [segment_peak(problem, start, end) for end in range(start, len(problem))]

    return _least(problem, peaks)


def least_peak(problem: ChainProblem) -> tuple[int, tuple[int, ...]]:
    """The same in quadratic time."""
    return _least(problem, lambda start: _segment_peaks(problem, start))


def _segment_peaks(problem: ChainProblem, start: int) -> list[int]:
    """The peaks of the segments from a start to each end, each from the one before.

    What the gradients at the end of a segment add is the same for all its forwards: these have one maximum.
    """
    peaks: list[int] = []
    others = forward = saved = 0
    for block in range(start, len(problem)):
        (option,) = problem.blocks[block].options
        forward = max(forward, saved + option.forward_peak)
        backward = saved + option.backward_peak + problem.later_gradients[block]
        others = max(others, problem.plain_peak[start][block], backward)
        saved += option.saved
        gradients = problem.gradient_bytes[block + 1] + problem.later_gradients[block]
        peaks.append(max(others, forward + gradients))
    return peaks


def _least(
    problem: ChainProblem, peaks_from: Callable[[int], list[int]]
) -> tuple[int, tuple[int, ...]]:
    length = len(problem)
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())] * (length + 1)
    for start in reversed(range(length)):
        choices = []
        for end, peak in enumerate(peaks_from(start), start):
            later, starts = best[end + 1]
            kept = problem.boundary_bytes[start][end + 1] if end + 1 < length else 0
            choices.append((max(peak, kept + later), starts))
        peak, starts = min(choices, key=lambda choice: choice[0])
        best[start] = peak, (start, *starts)
    return best[0]


MIN_PEAK: Final = Strategy("min-peak", fastest_option, of_segments(lambda problem: least_peak(problem)[1]))
