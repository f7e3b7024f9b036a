"""The largest number that fits a limit, where the need grows nearly in proportion: few questions, exact end.

Step memory is nearly affine in the batch: a secant through two answers mostly hits the batch or its
neighbour. Where it does not close in, the bracket is halved; before anything is found that does not fit, the
steps grow instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

GROWTH = 32  # times the largest that fits: how far a secant through small answers is trusted
PATIENCE = 3  # secants that do not halve the bracket


def largest_fitting(
    need: Callable[[int], int], limit: int, *, known: Mapping[int, int], start: int, most: int
) -> int:
    """The largest n from 0 to ``most`` that fits, or one whose successor does not if needs do not rise.

    Parameters
    ----------
    need
        What n needs; asked once for each n, and always for the n that is returned and its successor, unless
        they are known, 0 or beyond ``most``.
    limit
        n fits if its need is no more than that.
    known
        Needs known already. That of 0 may be a guess of the constant part; 0 is taken to fit.
    start
        Asked first, if there is nothing to go by.
    """
    answers = dict(known)
    low = max((n for n, size in answers.items() if size <= limit), default=0)
    high = min((n for n, size in answers.items() if size > limit and n > low), default=most + 1)
    low = min(low, most)
    guess = min(start, most) if set(answers) <= {0} else _guess(answers, limit, low, high, most)
    stalled, width = 0, high - low
    while high - low > 1:
        answers[guess] = need(guess)
        stalled += 1
        if answers[guess] > limit:
            high = guess
        else:
            stalled = 0 if high > most and guess >= 2 * low else stalled  # still growing
            low = guess
        if 2 * (high - low) <= width and high <= most:
            stalled, width = 0, high - low
        guess = _guess(answers, limit, low, high, most)
        if stalled >= PATIENCE:
            guess = (low + high) // 2 if high <= most else min(most, max(guess, low + 4**stalled))
    return low


def _guess(answers: Mapping[int, int], limit: int, low: int, high: int, most: int) -> int:
    """Where the secant through the two nearest answers meets the limit, inside the bracket."""
    below = sorted(n for n in answers if n <= low)
    if high <= most:
        first, second = below[-1] if below else 0, high
    else:
        first, second = (below[-2], below[-1]) if len(below) > 1 else (0, low)
    rise = answers.get(second, limit) - answers.get(first, 0)
    if second <= first or rise <= 0:
        meets = high - 1
    else:
        meets = first + (limit - answers.get(first, 0)) * (second - first) // rise
    return max(low + 1, min(meets, high - 1, GROWTH * max(1, low)))
