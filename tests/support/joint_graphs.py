"""Joint graphs that hypothesis draws."""

from __future__ import annotations

from hypothesis import strategies as st

from hybridremat.graph.joint import JointGraph, Phase
from support.nets import Net

SIZES = (1, 64, 1000, 4096, 10000)


@st.composite
def joint_graphs(draw) -> JointGraph:
    """Any reads that a joint graph allows: long skips, shared values, optional ops, gradients anywhere."""
    net = Net()
    inputs = [net.input() for _ in range(2)]
    forward: list[int] = []
    optional: list[int] = []
    backward: list[int] = [net.input(8, tangent=True)]

    def reads(*pools: list[int], near: int) -> list[int]:
        pool = sorted({value for values in pools for value in values})
        chosen = draw(st.lists(st.sampled_from(pool), max_size=2))
        return sorted({*chosen, *pools[0][-draw(st.integers(1, near)) :][:1]})

    def made() -> list[int]:
        return draw(st.lists(st.sampled_from(SIZES), min_size=1, max_size=2))

    for _ in range(draw(st.integers(1, 25))):
        phase, time = Phase.FORWARD, draw(st.integers(1, 100))
        sources = reads(forward or inputs, inputs, near=3)
        forward += net.op(phase, sources, made(), time=time, recomputable=draw(st.integers(0, 20)) > 0)
    for _ in range(draw(st.integers(1, 30))):
        if draw(st.integers(0, 4)) == 0:
            sources = reads(forward, optional, near=5)
            fields = {"time": draw(st.sampled_from((0, 50))), "recomputable": draw(st.integers(0, 8)) > 0}
            optional += net.op(Phase.OPTIONAL, sources, made(), **fields)
        else:
            sources = reads(backward, forward, optional, near=3)
            backward += net.op(Phase.BACKWARD, sources, made())
    net.held = {forward[-1]} | set(draw(st.lists(st.sampled_from(forward), max_size=1)))
    net.gradients = set(draw(st.lists(st.sampled_from([*backward[1:], *forward, *optional]), max_size=4)))
    return net.joint(released_outputs=frozenset(draw(st.lists(st.sampled_from(forward), max_size=1))))
