"""Small steps whose values may move to host memory, and all their moves."""

from __future__ import annotations

import itertools
from tempfile import gettempdir

from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Move, Op, Phase, Value, host_bytes


def mirrored(sizes, times=None):
    """A chain: each forward op makes a value from the one before, and each backward op reads one of them."""
    count = len(sizes)
    times = times or [1] * (2 * count)
    values = [Value(n, size, n) for n, size in enumerate(sizes)]
    values += [Value(count + n, 1, count + n) for n in range(count)]
    ops = [Op(n, f"f{n}", Phase.FORWARD, (n - 1,) if n else (), (n,), time=times[n]) for n in range(count)]
    for n in range(count):
        reads = (count - 1 - n, *((count + n - 1,) if n else ()))
        ops.append(Op(count + n, f"b{n}", Phase.BACKWARD, reads, (count + n,), time=times[count + n]))
    return JointGraph(tuple(ops), tuple(values), gradients=frozenset({2 * count - 1}))


@st.composite
def chains(draw, most=5, equal=False):
    count = draw(st.integers(2, most))
    size = st.just(10) if equal else st.integers(1, 20)
    sizes = draw(st.lists(size, min_size=count, max_size=count))
    times = draw(st.lists(st.integers(1, 40), min_size=2 * count, max_size=2 * count))
    return mirrored(sizes, times)


def every_move(each, split):
    """All moves of one version, and none."""
    yield None
    for free, fetch in itertools.product(range(each.last + 1, split + 1), range(split, each.first + 1)):
        yield Move(each.value, each.birth, free, fetch, each.first)


def emitted_with_moves(step, schedule):
    """The two graphs of a schedule, with its moves written into them; they wait in a file."""
    from hybridremat.compiler.emit import emit
    from hybridremat.compiler.offload.stores import Stores
    from hybridremat.compiler.offload.targets import Target
    from hybridremat.compiler.offload.write import write_moves

    graphs = emit(step, schedule)
    if schedule.moves:
        host = host_bytes(step.graph.values[move.value].bytes for move in schedule.moves)
        write_moves(step, graphs, schedule, Stores(Target(gettempdir()), "cpu", host))
    return graphs
