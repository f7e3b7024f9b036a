"""A small graph by hand, and random graphs with a random valid schedule."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hybridremat.graph.joint import Delivery, JointGraph, Op, Phase, Schedule, Value


def small_graph(**roles: object) -> JointGraph:
    """Input 0 → a (10) → b (20) → c (40); backward d (5) reads a, tangent (3) and writes a gradient."""
    ops = (
        Op(0, "a", Phase.FORWARD, (0,), (1,), time=1, flops=2),
        Op(1, "b", Phase.FORWARD, (1,), (2,), time=10, temp=100),
        Op(2, "c", Phase.FORWARD, (2,), (3,), time=100),
        Op(3, "d", Phase.BACKWARD, (1, 4), (5,), time=1000, flops=4),
    )
    values = (
        Value(0, 1000, None),
        Value(1, 10, 0, "a"),
        Value(2, 20, 1, "b"),
        Value(3, 40, 2, "c"),
        Value(4, 3, None, tangent=True),
        Value(5, 5, 3),
    )
    return JointGraph(ops, values, **roles)  # type: ignore[arg-type]


def random_step(seed: int) -> tuple[JointGraph, Schedule]:
    """A random graph and a random valid list of executions of it."""
    random = Random(seed)
    values = [Value(0, 50, None), Value(1, random.randint(0, 9), None, tangent=True)]
    ops: list[Op] = []
    for i in range(random.randint(1, 12)):
        reads = tuple(random.sample(range(len(values)), random.randint(0, min(3, len(values)))))
        writes = tuple(range(len(values), len(values) + random.randint(0, 2)))
        phase = random.choice([Phase.FORWARD, Phase.BACKWARD])
        values += [Value(v, random.randint(0, 30), i) for v in writes]
        op = Op(i, f"op{i}", phase, reads, writes, temp=random.randint(0, 9), random=random.random() < 0.3)
        over = tuple(v for v in reads if values[v].producer is not None and random.random() < 0.5)
        if over and len(writes) == 1:
            size = values[over[0]].bytes
            over = tuple(v for v in over if values[v].bytes == size)
            values[-1], op = replace(values[-1], bytes=size), replace(op, overwrites=over)
        ops.append(op)
    steps = list(range(len(ops)))
    for _ in range(random.randint(0, 10)):
        again = random.randrange(len(ops))
        steps.insert(random.randint(steps.index(again) + 1, len(steps)), again)
    made = [v.id for v in values if v.producer is not None]
    some = [frozenset(v for v in made if random.random() < 0.2) for _ in range(3)]
    free = sorted(set(made).difference(*some))
    leaving = [v for v in free if random.random() < 0.3]
    graph = JointGraph(
        tuple(ops),
        tuple(values),
        held_outputs=some[0],
        released_outputs=some[1],
        gradients=some[2],
        deliveries=tuple(Delivery(v, 0, place, random.randint(0, 40)) for place, v in enumerate(leaving)),
        rng_state_bytes=random.randint(0, 5),
    )
    return graph, Schedule(tuple(steps), random.randint(0, len(steps)))
