"""Memory of the eager code between the graphs of a step, which runs under plain autograd.

It is measured in one more run of a surveyed forward, in which inputs and outputs of graphs are kept alive, as
in training, but for inputs that a graph alone keeps if its backward reads them: allocations are recorded
between the graphs, and in a backward through the eager code alone, with gradients of ones. A *section* is the
eager code before one graph, or after the last.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from hybridremat.graph.costs.allocations import record
from hybridremat.graph.costs.recorder import Mark, Recording
from hybridremat.graph.private_torch import (
    has_saved_hooks,
    new_node_number,
    next_node_number,
    node_number,
    ones_for_result,
    stand_in,
    storage_reference,
    tree_leaves,
    without_memory,
)
from hybridremat.graph.tracing.fx_nodes import tensors
from hybridremat.graph.tracing.non_leaf import is_non_leaf_source
from hybridremat.sequence.joined_graphs import PartPoint, StepPart

# A result of a node of an autograd graph: what a gradient is made for.
Edge = tuple[Node, int]


def _unmarked(_: str) -> None:
    pass


@dataclass
class EagerCodeRecorder:
    """Called when the graphs of a step start and end, while the forward runs.

    Attributes
    ----------
    starts
        For each section, the least number that its autograd nodes have.
    nodes
        For each section, how many autograd nodes it makes in the forward.
    results
        For each section, its results that graphs or the caller use under autograd, as tensors like them that
        take no memory; None for one that only later sections use.
    waiting
        For each section, the results of earlier sections for which its backward is the first to make
        gradients.
    uses
        In how many graphs each leaf and each output of a graph is used. Results of eager code do not count:
        autograd adds up their gradients in place.
    passed
        For each graph, the places of its inputs that the section before it made, and of those that the graph
        before that made, each with the result that it is.
    handed
        For each section, the outputs of the graph before it, each in a storage of its own.
    taken
        For each section, those of them that it uses.
    returned
        For each section, its results that the model returns: their gradients come from outside.
    every_use
        In how many graphs and sections each result is used.
    left
        For each section, bytes of the gradients that its backward leaves in leaves, and of those that code
        retains, of what it makes or of outputs of the graph before it, with what it has made there.
    ended
        For each section, bytes of gradients that later ones have made for it, and that are gone after its
        backward.
    held
        Inputs and outputs of the graphs, kept alive.
    fading
        Inputs that are not: what tells whether they are there, and their bytes; without those that have gone.
    freed
        For each section, the bytes of those that were gone at its end.
    read
        The storages of what graphs read under autograd, and of what the model returns.
    outputs
        For each graph, the storages of its outputs by place.
    unsaved
        For each graph, the places of outputs that no graph reads under autograd, and no code saves.
    """

    device: str
    mark: Mark = lambda _: None
    starts: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    results: list[dict[Edge, torch.Tensor | None]] = field(default_factory=list)
    waiting: list[set[Edge]] = field(default_factory=list)
    uses: Counter[Edge] = field(default_factory=Counter)
    passed: list[tuple[dict[int, Edge], dict[int, Edge]]] = field(default_factory=list)
    handed: list[set[Edge]] = field(default_factory=list)
    taken: dict[int, set[Edge]] = field(default_factory=dict)
    returned: defaultdict[int, set[Edge]] = field(default_factory=lambda: defaultdict(set))
    every_use: Counter[Edge] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)
    ended: dict[int, int] = field(default_factory=dict)
    held: list[Sequence[object]] = field(default_factory=list)
    fading: list[tuple[Callable[[], bool], int]] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    read: set[int] = field(default_factory=set)
    outputs: list[dict[int, int]] = field(default_factory=list)
    unsaved: list[set[int]] = field(default_factory=list)

    def begin(self) -> None:
        """The forward starts."""
        self._open(())

    def enter(self, args: Sequence[object], fading: Collection[int]) -> None:
        """A graph starts; one without gradients makes none of its inputs. ``fading``: places of these."""
        under_autograd = torch.is_grad_enabled()
        edges = self._close(args, fading, under_autograd=under_autograd)
        self.uses.update(edge for edge in edges if _ends(edge[0]))
        made, handed = {}, {}
        for place, tensor in enumerate(args if under_autograd else ()):
            for edge in _edges([tensor]):
                if edge in self.handed[-1]:
                    handed[place] = edge
                elif not _ends(edge[0]) and node_number(edge[0]) >= self.starts[-1]:
                    made[place] = edge
        self.passed.append((made, handed))

    def leave(self, outputs: Sequence[object]) -> None:
        """A graph ends; of outputs in storages that are not their own, autograd makes the gradients."""
        inputs = {id(each): each for each in self.held[-1] if isinstance(each, torch.Tensor)}
        made = [each for each in outputs if isinstance(each, torch.Tensor)]
        uses = Counter(map(_storage, [*inputs.values(), *made]))
        self.held.append(outputs)
        places = enumerate(outputs)
        self.outputs.append({n: _storage(each) for n, each in places if isinstance(each, torch.Tensor)})
        self._open([each for each in made if uses[_storage(each)] == 1])
        if not torch.is_grad_enabled():
            self._take_over()

    def end(self, outputs: Sequence[object]) -> None:
        """The model returns."""
        for edge in self._close(outputs):
            if not _ends(edge[0]):
                self.returned[bisect_right(self.starts, node_number(edge[0])) - 1].add(edge)

    def _open(self, outputs: Sequence[object]) -> None:
        self.handed.append(set(_edges(outputs)))
        self.starts.append(new_node_number())
        self.results.append({})
        self.waiting.append(set())
        self.mark(f"forward {len(self.starts) - 1}")

    def _take_over(self) -> None:
        """Let this section run the backward of the one before it as well.

        The graph between them ran without gradients, perhaps in the forward of an ``autograd.Function``,
        whose node is older than what it saves at its end.
        """
        self.starts[-1] = self.starts[-2]
        self.results[-1], self.results[-2] = self.results[-2], {}
        self.handed[-1], self.handed[-2] = self.handed[-2] | self.handed[-1], set()

    def _close(
        self, args: Sequence[object], fading: Collection[int] = (), *, under_autograd: bool = True
    ) -> set[Edge]:
        self.mark("")
        self.nodes.append(next_node_number() - self.starts[-1] - 1)
        self.freed.append(sum(size for is_there, size in self.fading if not is_there()))
        self.fading = [each for each in self.fading if each[0]()]
        going = tensors([args[place] for place in fading])
        self.fading += [(storage_reference(each), each.nbytes) for each in going]
        held = [each for place, each in enumerate(args) if place not in fading]
        self.held.append(held)
        if under_autograd:
            self.read.update(map(_storage, tensors(held)))
        taken = _edges(args) if under_autograd else {}
        self.every_use.update(taken.keys())
        for edge, tensor in taken.items():
            self._note_root(edge, without_memory(tensor))
        return set(taken)

    def _note_root(self, edge: Edge, tensor: torch.Tensor | None) -> None:
        """Note, for the section that made it, a result for which there is a gradient."""
        section = bisect_right(self.starts, node_number(edge[0])) - 1
        if section >= 0 and not _ends(edge[0]):
            self.results[section].setdefault(edge, tensor)

    def backward(self) -> None:
        """Run the backward of each section, the last first."""
        saved = _saved_storages(edge[0] for roots in self.results for edge in roots)
        gone = [made.items() if saved is not None else () for made in self.outputs]
        kept = self.read | (saved or set())
        self.unsaved = [{n for n, each in made if each not in kept} for made in gone]
        self.left.update(self._retained())
        self.mark("backward")  # what is let go from here on was there when the forward was over
        for index in reversed(range(len(self.results))):
            roots = self.results[index]
            self._let_go(self.starts[index])
            if not roots:
                continue
            used = _used_before(roots, self.starts[index])
            self.every_use.update(used)
            self.taken[index] = used & self.handed[index]
            earlier = {edge for edge in used if not _ends(edge[0])}
            self.waiting[index] = earlier.difference(*self.waiting)
            for edge in earlier:
                self._note_root(edge, None)
            going = self.arriving_once(index)
            ones = {e: stand_in(*e) if e in going else ones_for_result(*e, t) for e, t in roots.items()}
            alone = used.isdisjoint(_behind(node for node, _ in used))
            self.mark(f"backward {index}")
            with _held_by_nodes({edge: ones_for_result(*edge, roots[edge]) for edge in going}) as given:
                self.left[index] += _run(ones, used, given, retain=not alone)
            self.mark("")
            self.ended[index] = self._ended(ones.items(), used)

    def _retained(self) -> Counter[int]:
        """For each section, bytes of gradients that are retained, and of their tensors, which are held."""
        found, held = Counter[int](), {storage for made in self.outputs for storage in made.values()}
        for each in gc.get_objects():
            if not issubclass(type(each), torch.Tensor) or not each.retains_grad or each.grad_fn is None:
                continue
            section = bisect_right(self.starts, node_number(each.grad_fn)) - 1
            if section >= 0:
                own = each.untyped_storage().nbytes() if _storage(each) not in held else 0
                found[section + is_non_leaf_source(each.grad_fn)] += each.nbytes + own
                held.add(_storage(each))
        return found

    def _let_go(self, start: int) -> None:
        """Keep no longer what was made since a number: graphs that might keep it have run their backward."""
        self.held = [[each for each in values if not _is_made_since(start, each)] for values in self.held]

    def arriving_once(self, index: int) -> set[Edge]:
        """The results of a section whose gradients the backward after it makes alone: this uses them up."""
        made = self.passed[index][0] if index < len(self.passed) else {}
        return {edge for edge in made.values() if self.every_use[edge] == 1}

    def _ended(self, given: Iterable[tuple[Edge, torch.Tensor]], used: Iterable[Edge]) -> int:
        """Bytes of the gradients ``given`` to a backward that waited for it, and are not what it has left."""
        left = [_gradient_of(node) for node, _ in used]
        on = {_storage(each) for each in left if each is not None and each.layout is torch.strided}
        waited = set[Edge]().union(*self.waiting)
        return _bytes(each for edge, each in given if edge in waited and _storage(each) not in on)

    def waiting_bytes(self, index: int) -> int:
        """Bytes of gradients that a section makes for earlier ones, alive while graphs between them run."""
        return sum(ones_for_result(*edge).nbytes for edge in self.waiting[index])

    def once(self, places: Mapping[int, Edge]) -> set[int]:
        """The places of results that are used once: whoever made these takes their gradients next."""
        return {place for place, edge in places.items() if self.every_use[edge] == 1}

    def left_for_graph(self, index: int) -> int:
        """Bytes of the gradients that a section's backward leaves for the graph before it alone."""
        left = {}
        for edge in self.taken.get(index, ()):
            if self.every_use[edge] == 1 and (gradient := _gradient_of(edge[0])) is not None:
                left[_storage(gradient)] = gradient.untyped_storage().nbytes()
        return sum(left.values())

    @property
    def joined_bytes(self) -> int:
        """The largest gradient that several graphs make and autograd adds up."""
        return max((ones_for_result(*edge).nbytes for edge, runs in self.uses.items() if runs > 1), default=0)


def _edges(values: Iterable[object]) -> dict[Edge, torch.Tensor]:
    """The tensors that require a gradient, each by the result that it is.

    A view that is made without gradients says that it requires one, and has no history.
    """
    found = {}
    for tensor in values:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not _has_lost_its_history(tensor):
            node, index, *_ = get_gradient_edge(tensor)
            found[node, index] = tensor
    return found


def _is_made_since(start: int, value: object) -> bool:
    node = value.grad_fn if isinstance(value, torch.Tensor) else None
    return node is not None and node_number(node) >= start


def _has_lost_its_history(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is None and tensor._is_view()


def _saved_storages(roots: Iterable[Node]) -> set[int] | None:
    """The storages of all that autograd has saved; None where it does not say.

    So it is where something was changed in place, and with hooks: what a checkpoint unpacks, it runs again.
    """
    found: set[int] = set()
    stack = list(set(roots))
    seen = set(stack)
    while stack:
        node = stack.pop()
        if has_saved_hooks(node):
            return None
        try:
            saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            saved.append(getattr(node, "saved_tensors", ()))  # of an autograd.Function
        except RuntimeError:
            return None
        found.update(map(_storage, tensors(tree_leaves(saved))))
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                stack.append(after)
    return found


def _behind(nodes: Iterable[Node]) -> set[Edge]:
    """All results that some nodes depend on, as far as the autograd graph goes."""
    found: set[Edge] = set()
    stack = [node for node in set(nodes) if not _ends(node)]
    seen = set(stack)
    while stack:
        for node, index in stack.pop().next_functions:
            if node is not None:
                found.add((node, index))
                if node not in seen and not _ends(node):
                    seen.add(node)
                    stack.append(node)
    return found


@contextmanager
def _held_by_nodes(ones: dict[Edge, torch.Tensor]) -> Iterator[set[int]]:
    """Give a backward these gradients as it reaches their results, for nobody else; yields their storages."""

    def given(edge: Edge, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(ones.pop(edge) if n == edge[1] else each for n, each in enumerate(gradients))

    references = [storage_reference(each) for each in ones.values()]  # no other storage gets their numbers
    hooks = [edge[0].register_prehook(partial(given, edge)) for edge in ones]
    yield set(map(_storage, ones.values()))
    for hook in hooks:
        hook.remove()
    references.clear()


def _run(ones: Mapping[Edge, torch.Tensor], used: Iterable[Edge], given: set[int], *, retain: bool) -> int:
    """Run a backward from the results that have ``ones`` to what it depends on, ``used``, and no further.

    ``given`` are storages of other gradients that it gets. What it reads is freed, unless some of ``used``
    depends on others: what is between them runs then, too, and runs again. Leaves get their gradients as
    autograd would give them; returns the bytes of those that are new.
    """
    ends, given, new = list(used), given | set(map(_storage, ones.values())), 0
    if not ends:
        return 0
    edges, inputs = ([GradientEdge(*edge) for edge in each] for each in (ones, ends))
    made = torch.autograd.grad(edges, inputs, [*ones.values()], allow_unused=True, retain_graph=retain)
    gradients: list[torch.Tensor | None] = [*made]
    del made
    for place, (node, _) in enumerate(ends):
        gradient, gradients[place] = gradients[place], None
        leaf = _leaf_of(node) if _ends(node) else None
        if gradient is None or leaf is None:
            continue
        if leaf.grad is not None:
            leaf.grad += gradient
            continue
        if gradient.layout != torch.strided:
            leaf.grad = gradient
            new += sum(each.nbytes for each in (gradient._indices(), gradient._values()))
            continue
        shared = _storage(gradient) in given or gradient.stride() != leaf.stride()
        leaf.grad = gradient.clone() if shared and not is_non_leaf_source(node) else gradient
        new += 0 if _storage(leaf.grad) in given else leaf.grad.untyped_storage().nbytes()
        given.add(_storage(leaf.grad))
    return new


def _leaf_of(node: Node) -> torch.Tensor | None:
    """The leaf that a backward ends in; of an output of a graph, what it began as (``non_leaf``)."""
    end: Any = node.next_functions[0][0] if is_non_leaf_source(node) else node
    return getattr(end, "variable", None)


def _gradient_of(output: Node) -> torch.Tensor | None:
    """What a backward has left for an output of a graph."""
    leaf = _leaf_of(output)
    return None if leaf is None else leaf.grad


def _bytes(given: Iterable[torch.Tensor]) -> int:
    """Those of the tensors' storages, parameters apart."""
    made = tensors([each for each in given if not isinstance(each, nn.Parameter)])
    return sum({_storage(each): each.untyped_storage().nbytes() for each in made}.values())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _ends(node: Node) -> bool:
    """Whether a backward through eager code ends here: at a leaf, or at an output of a graph."""
    return not node.next_functions or is_non_leaf_source(node)


def _used_before(roots: Iterable[Edge], start: int) -> set[Edge]:
    """The results from before ``start`` that the nodes since then, up to these roots, depend on."""
    left: set[Edge] = set()
    seen = {node for node, _ in roots}
    stack = list(seen)
    while stack:
        for node, index in stack.pop().next_functions:
            if node is None or node in seen:
                continue
            if _ends(node) or node_number(node) < start:
                left.add((node, index))
            else:
                seen.add(node)
                stack.append(node)
    return left


def measure_eager_code(
    recorder: EagerCodeRecorder, forward: Callable[[], Any]
) -> tuple[list[StepPart | None], list[set[int]]]:
    """Each section as a part with one point, None if it allocates nothing; and what passes, for each graph.

    What the caller holds in the backward belongs to the last section, and stays: outputs and their gradients.
    These are the places of inputs whose gradients its backward makes and the backward after it takes: they
    are gone then. ``forward`` runs the surveyed forward, and returns the tensors that the caller holds then.
    """
    held: list[int] = []

    def run(mark: Mark) -> None:
        recorder.mark = mark
        recorder.begin()
        outputs = forward()
        recorder.end(outputs)
        handed = {storage for made in recorder.outputs for storage in made.values()}
        own = [each for each in outputs if _storage(each) not in handed]
        held.append(_bytes(own) + sum(each.nbytes for each in _edges(outputs).values()))
        recorder.backward()

    recording = record(recorder.device, run)
    segments = recording.new_segments or recording.segments
    figures = {segment.name: segment.above_start for segment in segments}
    lasting = _lasting(recording)
    parts: list[StepPart | None] = []
    passing: list[set[int]] = []
    for index in range(len(recorder.results)):
        waiting = recorder.waiting_bytes(index)
        forward_peak, saved = figures[f"forward {index}"]
        above, _ = figures.get(f"backward {index}", (0, 0))
        kept = saved = max(0, saved) if lasting is None else saved
        if lasting is not None:
            kept = lasting[f"forward {index}"]
        if index == len(recorder.results) - 1:
            waiting += sum(held)
        ended = recorder.ended.get(index, 0)
        nothing = not (forward_peak or saved or kept or above or waiting or ended or recorder.left[index])
        made, handed = recorder.passed[index] if index < len(recorder.passed) else ({}, {})
        arriving = {*made.values(), *recorder.returned[index]} - recorder.arriving_once(index)
        above += sum(ones_for_result(*edge).nbytes for edge in arriving)
        point = PartPoint(forward_peak, kept + above, saved, time=0, inputs=-recorder.freed[index])
        left = max(0, recorder.left[index] - recorder.left_for_graph(index))
        parts.append(None if nothing else StepPart((point,), left + waiting - ended, saved - kept))
        runs_backward = f"backward {index}" in figures
        passing.append(recorder.once(made if runs_backward else {**made, **handed}))
    return parts, passing[: len(recorder.passed)]


def _lasting(recording: Recording) -> dict[str, int] | None:
    """Bytes allocated in each segment that are there when the forward is over; None if they are not known."""
    if recording.moved is None or recording.new_segments is None:
        return None
    names = [segment.name for segment in recording.new_segments]
    over = next((n for n, name in enumerate(names) if name.startswith("backward")), len(names))
    lasting = [segment.end - segment.start for segment in recording.new_segments]
    for (since, until), size in recording.moved.items():
        lasting[until] += size  # it was not allocated here
        lasting[since] -= size if until < over else 0
    return dict(zip(names, lasting, strict=True))
