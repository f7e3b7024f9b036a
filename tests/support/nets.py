"""Small joint graphs written by hand: a net as forward ops, its backward derived as autograd would."""

from __future__ import annotations

from hybridremat.graph.joint import JointGraph, Op, Phase, Schedule, Value


class Net:
    """Collects ops; :meth:`joint` adds the backward. Sizes in bytes, times in nanoseconds."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.tape: list[tuple[int, tuple[int, ...], bool, int]] = []
        self.gradients: set[int] = set()
        self.held: set[int] = set()

    def input(self, size: int = 0, tangent: bool = False) -> int:
        return self._value(size, None, tangent)

    def _value(self, size: int, producer: int | None, tangent: bool = False) -> int:
        self.values.append(Value(len(self.values), size, producer, f"v{len(self.values)}", tangent=tangent))
        return len(self.values) - 1

    def op(self, phase: Phase, reads, sizes, *, target="op", time=10, **fields) -> tuple[int, ...]:
        writes = tuple(self._value(size, len(self.ops)) for size in sizes)
        name = f"{target}_{len(self.ops)}"
        op = Op(len(self.ops), name, phase, tuple(reads), writes, target=target, time=time, **fields)
        self.ops.append(op)
        return writes

    def layer(self, target, reads, size, *, weight=0, saves=True, time=10, **fields) -> int:
        """A forward op; its backward reads its inputs if ``saves``, ``weight`` is a gradient in bytes."""
        (value,) = self.op(Phase.FORWARD, reads, [size], target=target, time=time, **fields)
        self.tape.append((value, tuple(reads), saves, weight))
        return value

    def optional(self, reads, size, **fields) -> int:
        return self.op(Phase.OPTIONAL, reads, [size], target="optional", **fields)[0]

    def backward(self, reads, size, *, gradient=False, target="backward", time=10) -> int:
        (value,) = self.op(Phase.BACKWARD, reads, [size], target=target, time=time)
        if gradient:
            self.gradients.add(value)
        return value

    def derive(self, output: int) -> None:
        """The backward ops, newest forward op first; gradients of one value are added up."""
        arriving: dict[int, list[int]] = {output: [self.input(self.values[output].bytes, tangent=True)]}
        for value, reads, saves, weight in reversed(self.tape):
            incoming = arriving.pop(value, [])
            if not incoming:
                continue
            size = self.values[value].bytes
            gradient = incoming[0]
            for other in incoming[1:]:
                gradient = self.backward([gradient, other], size, target="add")
            saved = list(reads) if saves else []
            for read in reads:
                if self.values[read].producer is not None:
                    made = self.backward([gradient, *saved], self.values[read].bytes, target="input_gradient")
                    arriving.setdefault(read, []).append(made)
            if weight:
                self.backward([gradient, *saved], weight, gradient=True, target="weight_gradient")

    def joint(self, **fields) -> JointGraph:
        return JointGraph(
            tuple(self.ops),
            tuple(self.values),
            held_outputs=frozenset(self.held),
            gradients=frozenset(self.gradients),
            **fields,
        )


def transformer(layers: int, *, width: int = 1000) -> JointGraph:
    """Residual layers of 10 ops: attention under a shared mask, then a wide feed-forward part."""
    net = Net()
    mask = net.layer("mask", [net.input()], width // 2, saves=False)
    stream = net.layer("embedding", [net.input()], width, weight=8 * width)
    for _ in range(layers):
        normal = net.layer("normalize", [stream], width, weight=1)
        joined = net.layer("linear", [normal], 3 * width, weight=3 * width, time=300)
        attended = net.layer("attention", [joined, mask], width, time=200)
        projected = net.layer("linear", [attended], width, weight=width, time=100)
        stream = net.layer("add", [stream, projected], width, saves=False)
        normal = net.layer("normalize", [stream], width, weight=1)
        wide = net.layer("linear", [normal], 4 * width, weight=4 * width, time=400)
        bent = net.layer("bend", [wide], 4 * width)
        narrow = net.layer("linear", [bent], width, weight=4 * width, time=400)
        stream = net.layer("add", [stream, narrow], width, saves=False)
    loss = net.layer("loss", [net.layer("head", [stream], 20 * width, weight=8 * width, time=900)], 1)
    net.held.add(loss)
    net.derive(loss)
    return net.joint()


def chain(length: int) -> JointGraph:
    """A chain of layers, whose backward reads what every layer read."""
    net = Net()
    value = net.input()
    for _ in range(length):
        value = net.layer("layer", [value], 10, time=100)
    net.derive(value)
    return net.joint()


def dear_and_cheap() -> tuple[JointGraph, Schedule]:
    """Two values of one size wait for the backward, one fits: the dear one is made again."""
    net = Net()
    x = net.input()
    dear = net.layer("dear", [x], 100, time=1000)
    cheap = net.layer("cheap", [x], 100, time=10)
    both = net.layer("join", [dear, cheap], 10)
    big = net.layer("big", [both], 150, saves=False)
    net.derive(net.layer("loss", [big], 1, saves=False))
    graph = net.joint()
    forward = graph.phase_ops(Phase.FORWARD)
    backward = list(graph.phase_ops(Phase.BACKWARD))
    reader = next(n for n, op in enumerate(backward) if dear in graph.ops[op].reads)
    return graph, Schedule((*forward, *backward[:reader], 0, *backward[reader:]), len(forward))
