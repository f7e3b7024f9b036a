"""Sizes as expressions, against the same arithmetic written in Python."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.sizes import (
    Domain,
    Term,
    as_data,
    combined,
    evaluated,
    from_data,
    renamed,
    rounded_up,
    symbols_of,
)

LEAVES = st.one_of(st.integers(-9, 9), st.sampled_from(["batch", "length"]))
OPERATORS = ("+", "*", "max", "min", "==", "!=", "<", "<=", "and", "or")


def terms(inner):
    pairs = st.tuples(inner, inner)
    both = st.builds(Term, st.sampled_from(OPERATORS), pairs)
    divided = st.builds(Term, st.sampled_from(("//", "%")), st.tuples(inner, st.integers(1, 9)))
    return st.one_of(both, divided, st.builds(Term, st.just("not"), st.tuples(inner)))


SIZES = st.recursive(LEAVES, terms, max_leaves=12)
PLACES = st.fixed_dictionaries({"batch": st.integers(0, 500), "length": st.integers(0, 500)})


def written(size):
    """An expression in Python's own words."""
    if not isinstance(size, Term):
        return f"({size})"
    inner = [written(each) for each in size.args]
    if size.op in ("max", "min"):
        return f"{size.op}({inner[0]}, {inner[1]})"
    if size.op == "not":
        return f"int(not {inner[0]})"
    if size.op in ("and", "or"):
        return f"int(bool({inner[0]}) {size.op} bool({inner[1]}))"
    return f"int({inner[0]} {size.op} {inner[1]})"


@given(SIZES, PLACES)
def test_sizes_are_what_python_computes(size, at):
    assert evaluated(size, at) == eval(written(size), {}, dict(at))


@given(SIZES, PLACES)
def test_what_is_written_and_read_is_the_same(size, at):
    read = from_data(json.loads(json.dumps(as_data(size))))
    assert read == size
    assert symbols_of(read) <= set(at)


@pytest.mark.parametrize("data", [["**", 2, 3], [], ["+"], [1, 2], None, 1.5, True, {"op": "+"}])
def test_other_data_is_no_size(data):
    with pytest.raises(ValueError, match="is no size"):
        from_data(data)


@given(st.sampled_from(["+", "*"]), st.lists(LEAVES, max_size=5), PLACES)
def test_numbers_are_put_together(op, sizes, at):
    numbers = [at.get(each, each) for each in sizes]
    expected = sum(numbers)
    if op == "*":
        expected = 1
        for each in numbers:
            expected *= each
    made = combined(op, *sizes)
    assert evaluated(made, at) == expected
    assert not isinstance(made, Term) or sum(isinstance(each, int) for each in made.args) <= 1


@given(SIZES, st.integers(1, 600), PLACES)
def test_rounding_up(size, multiple, at):
    exact, rounded = evaluated(size, at), evaluated(rounded_up(size, multiple), at)
    assert rounded % multiple == 0 and exact <= rounded < exact + multiple


def test_a_domain_says_why_sizes_are_outside():
    domain = Domain({"s0": (2, 15), "s1": (2, None)}, (Term("<", ("s0", "s1")),))
    assert domain.refused({"s0": 2, "s1": 3}) == ()
    assert domain.refused({"s0": 15, "s1": 10**9}) == ()
    assert domain.refused({"s0": 16, "s1": 20}) == ("s0 = 16 is outside 2 to 15",)
    assert domain.refused({"s0": 4, "s1": 1})[0] == "s1 = 1 is outside 2 to any size"
    assert domain.refused({"s0": 4, "s1": 3}) == ("(s0 < s1)",)
    assert domain.refused({"s0": 4}) == ("s1 is not given",)


def test_sizes_and_domains_by_other_names():
    names = {"s0": "batch", "s1": "length"}
    guard = Term("<", (Term("*", ("s0", 3)), "s1"))
    domain = Domain({"s0": (2, 15), "s1": (2, None)}, (guard, Term("<", ("s2", 4))))
    made = domain.renamed(names)
    expected = Term("<", (Term("*", ("batch", 3)), "length"))
    assert made == Domain({"batch": (2, 15), "length": (2, None)}, (expected,))
    for batch, length in ((2, 7), (2, 6), (16, 90)):
        refused = Domain(domain.ranges, (guard,)).refused({"s0": batch, "s1": length})
        assert len(made.refused({"batch": batch, "length": length})) == len(refused)
    with pytest.raises(KeyError):
        renamed("s2", names)


def test_a_symbol_without_a_number_is_an_error():
    with pytest.raises(KeyError):
        evaluated(Term("+", ("batch", 1)), {"length": 3})
