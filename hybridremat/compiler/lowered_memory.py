"""Exact memory of a step whose two graphs Inductor has lowered, from the code that it generates.

Inductor decides which values share a kernel and never get memory, which buffer is written over which, and in
which order kernels run. Its generated code has a line for every buffer that is allocated, handed on or freed;
these are replayed. What kernels of libraries allocate while they run is added, as measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hybridremat.compiler.emitted_memory import EmittedMemory
from hybridremat.graph.generated_code import BufferEvent
from hybridremat.graph.tracing.trace import TracedStep


@dataclass(frozen=True)
class LoweredStep:
    """What is known of the code of a schedule.

    ``workspaces``: bytes that kernels of libraries allocate while they run, by op, on tensors as Inductor
    lays them out.
    """

    memory: EmittedMemory
    workspaces: Mapping[int, int] = field(default_factory=dict)

    def laid_out(self, step: TracedStep) -> TracedStep:
        """The step with these workspaces; those of its costs are of tensors as PyTorch lays them out."""
        ops = [replace(op, temp=self.workspaces.get(op.id, op.temp)) for op in step.graph.ops]
        return replace(step, graph=replace(step.graph, ops=tuple(ops)))


def replay(
    events: Iterable[BufferEvent],
    given: Mapping[str, tuple[str, int]],
    workspace: Callable[[BufferEvent], int],
    always: int = 0,
    held: Collection[str] = (),
) -> int:
    """The most bytes that are alive at one time while a lowered graph runs.

    Parameters
    ----------
    events
        Its memory events.
    given
        Buffer and bytes of the inputs that are not resident, by name; several may be in one buffer.
    workspace
        Bytes that a call's kernel allocates while it runs.
    always
        Bytes that are alive all the time, beside these.
    held
        Buffers of ``given`` that the caller holds.
    """
    holds: dict[str, set[int]] = {}
    names: list[set[str]] = []
    size: list[int] = []

    def new(name: str, bytes_: int) -> None:
        holds[name] = {len(size)}
        names.append({name})
        size.append(bytes_)

    for name, (buffer, bytes_) in given.items():
        if f"{buffer} given" not in holds:
            new(f"{buffer} given", bytes_)
        holds[name] = holds[f"{buffer} given"]
        names[next(iter(holds[name]))].add(name)
    for buffer in {buffer for buffer, _ in given.values()}.difference(held):
        names[next(iter(holds[f"{buffer} given"]))].discard(f"{buffer} given")
    level = highest = always + sum(size)
    for event in events:
        if event.kind == "alloc":
            new(event.name, event.size)
            level += event.size
        elif event.kind in ("alias", "move"):
            storages = holds.get(event.source, set())
            holds[event.name] = holds.get(event.name, set()) | storages
            for storage in storages:
                names[storage].add(event.name)
        if event.kind in ("move", "free"):
            gone = event.source if event.kind == "move" else event.name
            for storage in holds.pop(gone, ()):
                names[storage].discard(gone)
                level -= size[storage] if not names[storage] else 0
        highest = max(highest, level + (workspace(event) if event.kind == "call" else 0))
    return highest
