"""The search for the largest batch, against brute force over every number."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from hybridremat.analysis.batch_search import largest_fitting

MOST = 300


def brute(needs, limit, most):
    """The largest n whose need fits; needs rise."""
    return max(n for n in range(most + 1) if n == 0 or needs[n] <= limit)


class Asked:
    def __init__(self, needs):
        self.needs, self.asked = needs, []

    def __call__(self, n):
        assert n not in self.asked, f"{n} is asked twice"
        assert 1 <= n < len(self.needs), n
        self.asked.append(n)
        return self.needs[n]


@given(
    steps=st.lists(st.integers(0, 1000), min_size=MOST, max_size=MOST),
    constant=st.integers(0, 2000),
    limit=st.integers(1, 200_000),
    start=st.integers(1, MOST),
    most=st.integers(1, MOST),
    guess=st.integers(0, 4000),
)
@example([0] * MOST, 1, 1, 1, MOST, 0)
@example([1000] * 3 + [0] * (MOST - 3), 0, 3000, 1, MOST, 0)
def test_any_rising_need_is_searched_exactly(steps, constant, limit, start, most, guess):
    needs = [constant]
    for step in steps:
        needs.append(needs[-1] + step)
    asked = Asked(needs)
    found = largest_fitting(asked, limit, known={0: guess}, start=start, most=most)
    assert found == brute(needs, limit, most)
    assert found == 0 or found in asked.asked
    assert found == most or found + 1 in asked.asked


@given(st.integers(1, 10**6), st.integers(1, 10**5), st.integers(1, 4000), st.integers(1, 64))
def test_an_affine_need_takes_few_questions(constant, slope, answer, start):
    limit = constant + slope * answer + slope // 2
    asked = Asked([constant + slope * n for n in range(65537)])
    assert largest_fitting(asked, limit, known={0: constant}, start=start, most=65536) == answer
    assert len(asked.asked) <= 6, asked.asked
    assert max(asked.asked) <= max(answer + 1, start)


def test_answers_that_are_known_are_not_asked_for():
    needs = [10 + 7 * n for n in range(1000)]
    asked = Asked(needs)
    known = {0: 10, 50: needs[50], 200: needs[200]}
    assert largest_fitting(asked, needs[120], known=known, start=1, most=999) == 120
    assert asked.asked == [120, 121]
    known |= {120: needs[120], 121: needs[121]}
    asked.asked.clear()
    assert largest_fitting(asked, needs[120], known=known, start=1, most=999) == 120
    assert asked.asked == []


def test_needs_that_bend_are_found_in_few_questions():
    for power in (0.5, 0.8, 1.3, 2):
        needs = [round(1000 * n**power) for n in range(65537)]
        asked = Asked(needs)
        assert largest_fitting(asked, needs[3000] + 1, known={0: 0}, start=1, most=65536) == 3000
        assert len(asked.asked) <= 30, (power, asked.asked)
