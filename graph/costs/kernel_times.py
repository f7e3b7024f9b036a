"""Times of kernels from a clock that is now and then wrong, on a machine that does other things as well.

Kernels are timed in turn, in several passes, so that a busy moment falls on all of them and the least time of
each comes from a quiet one. A time is kept if two passes agree on it, and if it goes with the times of its
neighbours: other kernels of the same op, by their roofline times. What does not is timed in further passes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low

PASSES, MORE_PASSES = 3, 3
AGREEING = 1.25  # two times of one kernel in quiet passes: caches and clock rates make less than this
# Times over roofline times. In GPT-2, Llama, ResNet-50 and a U-Net on CPU they are at most 6 times those of
# the same op's other kernels, and 20 times those of all kernels.
MOST_OF_SAME_OP, MOST_OF_ANY = 8, 64
NEGLIGIBLE_NS = 50_000


@dataclass(frozen=True)
class KernelTimes:
    """Nanoseconds by kernel: ``kept`` can be relied on, ``doubtful`` will do for one plan."""

    kept: dict[str, int]
    doubtful: dict[str, int]


@dataclass(frozen=True)
class Neighbours:
    """What the times of kernels are held against.

    Attributes
    ----------
    op_of
        What a kernel computes: kernels of the same op are alike.
    roofline
        Nanoseconds by flops and bytes.
    known
        Nanoseconds of kernels that are known already.
    """

    op_of: Mapping[str, str]
    roofline: Mapping[str, int]
    known: Mapping[str, int] = field(default_factory=dict)

    def implausible(self, measured: Mapping[str, int]) -> dict[str, int]:
        """Kernels whose time is far beyond their neighbours', and the time that these suggest."""
        times = {**self.known, **measured}
        rates = {key: time / self.roofline[key] for key, time in times.items()}
        by_op = defaultdict(list)
        for key in rates:
            by_op[self.op_of[key]].append(key)
        found = {}
        for key, time in measured.items():
            others = [rate for other, rate in rates.items() if other != key]
            same = [rates[other] for other in by_op[self.op_of[key]] if other != key]
            for factor, group in ((MOST_OF_ANY, others), (MOST_OF_SAME_OP, same)):
                suggested = median_low(group) * self.roofline[key] if len(group) > 1 else time
                if time > factor * suggested + NEGLIGIBLE_NS:
                    found[key] = max(1, round(suggested))
        return found


def measured_times(
    keys: Sequence[str], sample: Callable[[str], int | None], neighbours: Neighbours
) -> KernelTimes:
    """Time kernels in passes until their times agree and are plausible, or the passes are over.

    An implausible time is not kept. If most passes agree on it, it is what the kernel takes here (a grouped
    convolution beside dense ones), and will do for one plan; if not, the time that its neighbours suggest.

    Parameters
    ----------
    sample
        Runs a kernel and returns nanoseconds, too many at times; None if it cannot be run.
    """
    samples: dict[str, list[int]] = {key: [] for key in keys}
    again: Sequence[str] = keys
    for index in range(PASSES + MORE_PASSES):
        for key in again:
            time = sample(key)
            if time is None:
                del samples[key]
            else:
                samples[key].append(time)
        least = {key: min(times) for key, times in samples.items()}
        suspects = neighbours.implausible(least)
        again = [key for key in samples if key in suspects or _agreeing(samples[key]) < 2]
        if index + 1 < PASSES:
            again = list(samples)
    doubtful = {key: least[key] for key in again}
    for key, suggested in suspects.items():
        if 2 * _agreeing(samples[key]) <= len(samples[key]):
            doubtful[key] = suggested
    return KernelTimes({key: time for key, time in least.items() if key not in doubtful}, doubtful)


def _agreeing(times: Sequence[int]) -> int:
    """How many times are as good as the least one."""
    return sum(time <= AGREEING * min(times) for time in times)
