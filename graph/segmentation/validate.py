"""Check that a chain is what :class:`~hybridremat.graph.segmentation.chain.Chain` promises.

The checks start from the chain alone and share no code with :mod:`hybridremat.graph.segmentation.segment`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set as AbstractSet

from hybridremat.graph.joint import Phase
from hybridremat.graph.segmentation.chain import Chain


def validate_chain(chain: Chain) -> None:
    """Check every promise of ``chain``.

    Raises
    ------
    ValueError
        Naming the op or value and the promise that it breaks: an op that is missing or runs twice, a
        forward or backward op that reads what is not available in its block, an order that is not
        topological, a boundary that does not hold what crosses it, or a value that must be kept and is not.
    """
    _check_shape(chain)
    _check_ops(chain)
    _check_always_saved(chain)
    _check_forward(chain)
    _check_backward(chain)
    _check_gradient_boundaries(chain)
    _check_remade(chain)


def _check_shape(chain: Chain) -> None:
    expected = len(chain.blocks) + 1
    for name, sets in (("boundary", chain.boundary), ("gradient_boundary", chain.gradient_boundary)):
        if len(sets) != expected:
            raise ValueError(
                f"{name} has {len(sets)} sets for {len(chain.blocks)} blocks, expected {expected}"
            )
        if sets[0] or sets[-1]:
            raise ValueError(f"the first and the last {name} must be empty")


def _check_ops(chain: Chain) -> None:
    """Every op stands where its phase allows: once, or in several blocks if it is optional."""
    ops = chain.graph.ops
    once = Counter(op for block in chain.blocks for op in block.forward + block.backward)
    rebuilt = Counter(op for block in chain.blocks for op in block.optional)
    for op in ops:
        copies = min(once[op.id], 1) if op.id in chain.rebuilt else once[op.id]
        if copies + min(rebuilt[op.id], 1) != 1:
            raise ValueError(
                f"op {op.name} stands {once[op.id]} times and is optional {rebuilt[op.id]} times"
            )
        if op.phase is not Phase.OPTIONAL and op.id in rebuilt:
            raise ValueError(f"op {op.name} is {op.phase}, not optional")
        if op.id in rebuilt and not op.recomputable:
            raise ValueError(f"op {op.name} must run exactly once and cannot be optional")
    for number, block in enumerate(chain.blocks):
        if len(set(block.optional)) != len(block.optional):
            raise ValueError(f"an optional op stands twice in block {number}")
        if any(ops[op].phase is Phase.BACKWARD for op in block.forward):
            raise ValueError(f"a backward op stands in the forward of block {number}")
        if any(ops[op].phase is Phase.FORWARD for op in block.backward):
            raise ValueError(f"a forward op stands in the backward of block {number}")


def _forward_made(chain: Chain) -> dict[int, int]:
    """Block that makes each forward value."""
    ops = chain.graph.ops
    return {
        v: number for number, block in enumerate(chain.blocks) for op in block.forward for v in ops[op].writes
    }


def _check_always_saved(chain: Chain) -> None:
    graph = chain.graph
    made = _forward_made(chain)
    for value in sorted(chain.always - made.keys()):
        raise ValueError(
            f"value {graph.values[value].name or value} is always saved, but the forward does not make it"
        )
    readers = graph.readers()
    for value in sorted(made.keys() - chain.always):
        producer = graph.producer(value)
        assert producer is not None
        name = graph.values[value].name or value
        if value in graph.held_outputs or value in graph.gradients:
            raise ValueError(f"value {name} lives to the end of the step and must be always saved")
        if not producer.recomputable and readers[value]:
            raise ValueError(f"value {name} cannot be made twice and must be always saved")
    for block in chain.blocks:
        for op in block.forward:
            kept = chain.always.issuperset(graph.ops[op].writes)
            if graph.ops[op].phase is Phase.OPTIONAL and not kept:
                raise ValueError(
                    f"optional op {graph.ops[op].name} runs in the forward, but its values are not kept"
                )


def _check_forward(chain: Chain) -> None:
    """Forward ops read what came before in their block, what entered it, or what is always saved."""
    graph = chain.graph
    always_made: set[int] = set()
    for number, block in enumerate(chain.blocks):
        here = set(chain.boundary[number])
        for op_id in block.forward:
            op = graph.ops[op_id]
            for value in op.reads:
                known = value in here or value in always_made or graph.values[value].producer is None
                if not known:
                    raise ValueError(
                        f"forward op {op.name} in block {number} reads value {value}, not available there"
                    )
            here.update(op.writes)
            always_made |= chain.always.intersection(op.writes)
        missing = chain.boundary[number + 1] - here
        if missing or chain.boundary[number + 1] & chain.always:
            raise ValueError(f"boundary {number + 1} holds values that do not cross it: {sorted(missing)}")


def _check_backward(chain: Chain) -> None:
    """Backward ops read what their block holds or can rebuild, and gradients made before them."""
    graph = chain.graph
    gradients: set[int] = set()
    everywhere = chain.always.union(value.id for value in graph.values if value.producer is None)
    for number in range(len(chain.blocks) - 1, -1, -1):
        block = chain.blocks[number]
        here = set(chain.boundary[number])
        here.update(value for op in block.forward for value in graph.ops[op].writes)
        for op_id in block.optional:
            _require(chain, op_id, (here, everywhere), number)
            here.update(graph.ops[op_id].writes)
        for op_id in block.backward:
            _require(chain, op_id, (here, everywhere, gradients), number)
            gradients.update(graph.ops[op_id].writes)


def _require(chain: Chain, op_id: int, known: tuple[AbstractSet[int], ...], number: int) -> None:
    op = chain.graph.ops[op_id]
    for value in op.reads:
        if not any(value in part for part in known):
            raise ValueError(
                f"{op.phase} op {op.name} in block {number} reads value {value}, not available there"
            )


def _check_gradient_boundaries(chain: Chain) -> None:
    graph = chain.graph
    made = {
        v: i for i, block in enumerate(chain.blocks) for op in block.backward for v in graph.ops[op].writes
    }
    crossing: list[set[int]] = [set() for _ in chain.gradient_boundary]
    for number, block in enumerate(chain.blocks):
        for op in block.backward:
            for value in graph.ops[op].reads:
                if value in made and value not in graph.gradients:
                    for crossed in range(number + 1, made[value] + 1):
                        crossing[crossed].add(value)
    for number, (given, right) in enumerate(zip(chain.gradient_boundary, crossing, strict=True)):
        if given != right:
            raise ValueError(f"gradient boundary {number} differs in values {sorted(given ^ right)}")


def _check_remade(chain: Chain) -> None:
    """What is made again waits for the backward nowhere."""
    waiting = chain.remade & chain.always.union(*chain.boundary)
    if waiting:
        raise ValueError(f"values {sorted(waiting)} are to be made again, but the chain keeps them")
