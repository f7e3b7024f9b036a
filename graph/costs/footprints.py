"""What each distinct kernel of a step allocates, and what it returns: from a run on real tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import fx

from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.costs.kernel_benchmarks import is_out_of_memory, memory_errors
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import distinct_kernels
from hybridremat.graph.costs.made_inputs import DEPTHS, prepared, spreads
from hybridremat.graph.costs.real_results import Described, differs, kernels_in_order
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.private_torch import arg_tree_leaves
from hybridremat.graph.tracing.fx_nodes import storage_bytes, tensors
from hybridremat.graph.tracing.signature import fake_value, kernel_signature
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True)
class Footprint:
    """Bytes of one kernel: what it allocates beyond its outputs, and each output's real storage.

    A storage can be larger than the traced tensor says: a reduced ``mse_loss`` keeps all its elements.
    ``shared``: of each output that lives in the memory of an input, and is not traced so, which of the node's
    inputs; −1 for others. Empty if there is none.
    """

    workspace: int
    outputs: tuple[int, ...]
    shared: tuple[int, ...] = ()


@dataclass
class Trials:
    """What was found out about kernels: their footprints, or why they cannot be tried, by signature."""

    footprints: dict[str, Footprint] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


@dataclass
class _Trial:
    """One kernel, and what came of its run. ``outputs``: by traced storage, real bytes and :data:`shared`."""

    make: Callable[[], partial[object]]
    node: fx.Node
    returned: Callable[[object], None] = lambda _: None
    outputs: Sequence[tuple[int, int]] = ()
    refusal: str | None = None

    def footprint(self, peak: int) -> Footprint:
        """From the peak of its run."""
        new = sum(size for size, source in self.outputs if source < 0)
        shared = tuple(source for _, source in self.outputs)
        sizes = tuple(size for size, _ in self.outputs)
        return Footprint(max(0, peak - new), sizes, shared if max(shared, default=-1) >= 0 else ())

    def prepare(self, device: str) -> Callable[[], object]:
        """Make inputs, and return the run to be measured.

        On CUDA the kernel is called once before that: libraries allocate at their first call what they then
        keep (cuBLAS's workspace, 32 MiB on Hopper), which is no part of any later one.
        """
        call = self._unless_refused(partial(self._made, device))
        return (lambda: None) if call is None else partial(self._unless_refused, partial(self._result, call))

    def _made(self, device: str) -> partial[object]:
        call = self.make()
        if device == "cuda":
            call()
        return call

    def _result(self, call: partial[object]) -> object:
        result = call()
        self.outputs = _outputs(self.node, result, arg_tree_leaves(*call.args, **call.keywords))
        self.returned(result)
        return result

    def _unless_refused(self, run: Callable[[], R]) -> R | None:
        """Run something; note why a kernel does not take its inputs, whatever it raises.

        A lack of memory says nothing.
        """
        try:
            return run()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self.refusal = str(error).strip().partition("\n")[0] or type(error).__name__
        return None


def measure_footprints(
    step: TracedStep, store: KernelStore, progress: Callable[[int, int], None] = lambda *_: None
) -> Trials:
    """Try each kernel of a step that the store does not know, in the order of the graph.

    ``progress`` is called with how many ops were looked at, of how many, before each that is tried.

    The store learns what kernels return that is not as traced, and the step's nodes are noted with it. On the
    ``meta`` device nothing can run: no workspaces, and storages as traced.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    device = distinct_kernels(step).device
    if device == "meta":
        missing = {key: node for node, key in kernels_in_order(step, store) if _is_unknown(store, key)}
        return Trials({key: Footprint(0, _traced_sizes(node)) for key, node in missing.items()})
    tried: list[tuple[str, _Trial]] = []

    def unknown() -> Iterator[_Trial]:
        seen: set[str] = set()
        for done, (node, key) in enumerate(kernels_in_order(step, store)):
            if key in seen or not _is_unknown(store, key):
                continue
            seen.add(key)
            progress(done, len(step.graph.ops))
            for spread in spreads(node):
                for depth in DEPTHS:
                    made = partial(prepared, node, spread=spread, depth=depth)
                    tried.append((key, _Trial(made, node, partial(_compare, node, key, store))))
                    yield tried[-1][1]
                    if tried[-1][1].refusal is None:
                        break

    return _footprints(unknown(), tried, device)


def _is_unknown(store: KernelStore, key: str) -> bool:
    return store.temporaries.get(key) is None or store.outputs.get(key) is None


def _compare(node: fx.Node, key: str, store: KernelStore, result: object) -> None:
    found: Described | None = differs(fake_value(node), result)
    if found is not None:
        logger.info("%s returns %s, which is not what was traced", node, found)
        store.results[key] = found


def _footprints(trials: Iterator[_Trial], tried: Sequence[tuple[str, _Trial]], device: str) -> Trials:
    """Run trials one after the other; ``tried`` are those that ``trials`` has given, in its order.

    Of a kernel's trials the one with most workspace counts.
    """
    with outside_tracing(), memory_errors():
        figures = peaks_of((partial(trial.prepare, device) for trial in trials), device)
    found = Trials()
    for (key, trial), (peak, _) in zip(tried, figures, strict=True):
        if trial.refusal is None:
            found.refused.pop(key, None)
            known = (found.footprints[key],) if key in found.footprints else ()
            found.footprints[key] = max((trial.footprint(peak), *known), key=lambda each: each.workspace)
        elif key not in found.footprints:
            found.refused.setdefault(key, trial.refusal)
    return found


def _outputs(node: fx.Node, result: object, given: Sequence[object]) -> list[tuple[int, int]]:
    """For each storage that a node is traced to make: bytes of what really came, and whose they are.

    A gradient that was not asked for is traced, and does not come.
    """
    places = {source: place for place, source in enumerate(node.all_input_nodes)}
    own: dict[int | None, int] = {}  # real storages of the inputs, by position
    traced_own: set[int] = set()
    for source, item in zip(arg_tree_leaves(*node.args, **node.kwargs), given, strict=True):
        if isinstance(source, fx.Node):
            own |= dict.fromkeys(map(_storage, tensors(item)), places[source])
            traced_own |= set(map(_storage, tensors(source.meta.get("val"))))
    sizes: dict[int, tuple[int, int]] = {}
    seen: set[int | None] = set()
    for traced, real in _parts(node.meta.get("val"), result):
        name, storage = _storage(traced), None if real is None else _storage(real)
        size, source = sizes.get(name, (0, -1))
        if name not in traced_own:
            new = 0 if real is None or storage in seen else storage_bytes(real)
            sizes[name] = size + new, max(source, own.get(storage, -1))
        seen.add(storage)
    return list(sizes.values())


def _parts(traced: object, result: object) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """The tensors that were traced, each with what came in its place."""
    items, reals = (each if isinstance(each, (list, tuple)) else [each] for each in (traced, result))
    for item, real in zip(items, reals, strict=True):
        parts = tensors(item)
        made: list[torch.Tensor | None] = [*tensors(real)]
        yield from zip(parts, made or [None] * len(parts), strict=True)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _traced_sizes(node: fx.Node) -> tuple[int, ...]:
    """Bytes of each distinct storage among the tensors that a node is traced to return."""
    return tuple({_storage(each): storage_bytes(each) for each in tensors(node.meta.get("val"))}.values())


_workspaces: dict[str, int | None] = {}


def workspace_of(node: fx.Node, layouts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> int | None:
    """Workspace bytes of a kernel on tensors of these sizes and strides, measured once a process.

    None for a kernel that cannot be tried on them.

    Raises
    ------
    MeasurementError
        If no memory is left to try it.
    """
    key = f"{kernel_signature(node)} {layouts}"
    if key not in _workspaces:
        device = next((part.device.type for part in tensors(node.meta.get("val"))), "cpu")
        trials = [_Trial(partial(prepared, node, layouts, spread=spread), node) for spread in spreads(node)]
        found = _footprints(iter(trials), [("", each) for each in trials], device).footprints.get("")
        _workspaces[key] = None if found is None else found.workspace
    return _workspaces[key]
