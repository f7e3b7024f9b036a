"""Random chains of blocks of a training step."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from hybridremat.graph.joint import JointGraph, Op, Phase, Value
from hybridremat.graph.segmentation.chain import Block, Chain


class Builder:
    """Writes a joint graph op by op."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.ops: list[Op] = []
        self.values: list[Value] = []

    def op(self, phase: Phase, reads: list[int], *, outputs: int = 1, **flags: bool) -> list[int]:
        writes = tuple(range(len(self.values), len(self.values) + outputs))
        number = len(self.ops)
        for value in writes:
            self.values.append(Value(value, self.random.randint(1, 40), number))
        time, temp = self.random.randint(1, 30), self.random.choice([0, 0, 7])
        op = Op(number, f"op{number}", phase, tuple(reads), writes, time=time, temp=temp, **flags)
        self.ops.append(replace(op, flops=op.time))
        return list(writes)


def training_chain(seed: int) -> Chain:
    """A random chain of blocks: residual paths, an optional op, random ops, mutations, small outputs."""
    random = Random(seed)
    build = Builder(random)
    count = random.randint(1, 5)
    forward: list[list[int]] = []
    made: list[list[int]] = []
    entering: list[int] = []
    outputs: list[int] = []
    boundary: list[set[int]] = [set() for _ in range(count + 1)]
    for i in range(count):
        start = len(build.ops)
        own: list[int] = []
        for _ in range(random.randint(1, 5)):
            known = own + entering
            reads = random.sample(known, min(len(known), random.randint(1, 2)))
            own += build.op(
                Phase.FORWARD, reads, outputs=random.choice([1, 1, 2]), random=random.random() < 0.2
            )
        if random.random() < 0.5:
            build.op(Phase.FORWARD, own[-1:], outputs=0, mutates=True, recomputable=False)
        if random.random() < 0.4 or i == count - 1:
            outputs += build.op(Phase.FORWARD, own[-1:])
        riding = [v for v in entering if random.random() < 0.4]
        entering = own[-1:] + riding
        if i + 1 < count:
            boundary[i + 1] = set(entering)
        forward.append(list(range(start, len(build.ops))))
        made.append(own)
    optional, backward, gradients, between = backward_part(build, made, boundary, outputs)
    graph = JointGraph(
        tuple(build.ops),
        tuple(build.values),
        held_outputs=frozenset(outputs),
        gradients=frozenset(gradients),
        rng_state_bytes=random.choice([0, 3]),
    )
    blocks = tuple(map(Block, map(tuple, forward), map(tuple, optional), map(tuple, backward)))
    return Chain(
        graph, blocks, tuple(map(frozenset, boundary)), tuple(map(frozenset, between)), frozenset(outputs)
    )


def backward_part(
    build: Builder, made: list[list[int]], boundary: list[set[int]], outputs: list[int]
) -> tuple[list[list[int]], list[list[int]], list[int], list[set[int]]]:
    random, count = build.random, len(made)
    tangent = len(build.values)
    build.values.append(Value(tangent, 2, None, tangent=True))
    optional: list[list[int]] = [[] for _ in range(count)]
    backward: list[list[int]] = [[] for _ in range(count)]
    between: list[set[int]] = [set() for _ in range(count + 1)]
    gradients: list[int] = []
    arriving = [tangent]
    for i in reversed(range(count)):
        usable = made[i] + sorted(boundary[i])
        if random.random() < 0.5:
            usable = usable + build.op(Phase.OPTIONAL, random.sample(usable, 1))
            optional[i].append(len(build.ops) - 1)
        start = len(build.ops)
        for _ in range(random.randint(1, 4)):
            arriving = build.op(
                Phase.BACKWARD, arriving + random.sample(usable, random.randint(0, min(2, len(usable))))
            )
            if random.random() < 0.5:
                gradients += build.op(Phase.BACKWARD, arriving + random.sample(usable, 1))
        backward[i] = list(range(start, len(build.ops)))
        between[i] = set(arriving) if i else set()
    return optional, backward, gradients + arriving, between
