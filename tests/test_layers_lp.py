"""The linear program over layers: what each layer drops, and that its schedules are what it says."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hybridremat
from hybridremat.graph.memory import step_memory
from hybridremat.sequence.strategies.layers_lp import Item, LayersLp, cheapest, least_time
from support.examples import examples
from support.training import small
from support.wrapping import HOW

ITEMS = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=7)


def items_of(figures):
    return [Item(number, bytes_, time, 0, 0) for number, (bytes_, time) in enumerate(figures)]


@examples(40)
@given(ITEMS, st.integers(0, 100))
def test_a_layer_drops_enough_in_the_least_time(figures, share):
    items = items_of(figures)
    needed = sum(each.bytes for each in items) * share // 100
    sets = [s for size in range(len(items) + 1) for s in combinations(items, size)]
    least = min(sum(i.time for i in s) for s in sets if sum(i.bytes for i in s) >= needed)
    for choose in (least_time, cheapest):
        chosen = choose(items, needed)
        assert sum(each.bytes for each in chosen) >= needed
        assert sum(each.time for each in chosen) >= least
    assert sum(each.time for each in least_time(items, needed)) == least


def graph_of(name):
    model, batch = small(name)
    return hybridremat.plan(model, kwargs=batch, memory_limit="100%", **HOW).details.graph


@pytest.fixture(scope="module")
def graph():
    return graph_of("transformer")


def test_each_layer_saves_something_that_may_go_and_hands_the_rest_on(graph):
    search = LayersLp(graph)
    assert set(search._items) == {"blocks.0", "blocks.1"}
    random = {op.id for op in graph.ops if op.random}
    assert random and not random & {item.op for items in search._items.values() for item in items}


def test_what_is_dropped_is_made_again_once_in_the_backward(graph):
    search = LayersLp(graph)
    least = search.least(10**9).schedules[0]  # drops all
    again = least.steps[least.num_forward :]
    dropped = {item.op for items in search._items.values() for item in items}
    assert all(again.count(op) == 1 for op in dropped)
    assert step_memory(graph, least).peak < step_memory(graph, search._plain).peak


def test_the_program_asks_no_more_than_a_limit_needs(graph):
    search = LayersLp(graph)
    plain = step_memory(graph, search._plain).peak
    assert not any(search._shared_out(plain).values())
    some, all_ = (sum(search._shared_out(plain * share // 100).values()) for share in (95, 80))
    assert 0 < some < all_
    (first, *_) = search.under(plain * 95 // 100).schedules
    assert step_memory(graph, first).peak < plain
