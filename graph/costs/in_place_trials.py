"""Try on the device whether a kernel may write its result over one of its inputs.

A form counts only where it gives the same bits as the plain call on random numbers of these very shapes,
strides and types, and allocates no more. That is strong evidence, not a proof.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from hybridremat.graph.costs.allocations import peaks_of
from hybridremat.graph.costs.index_ranges import index_ranges
from hybridremat.graph.costs.kernel_benchmarks import is_out_of_memory, memory_errors
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.costs.kernels import Kernels, distinct_kernels
from hybridremat.graph.costs.random_numbers import repeated
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.tracing.fx_nodes import has_effects, is_random
from hybridremat.graph.tracing.in_place import in_place_form, overwritable
from hybridremat.graph.tracing.signature import distinct_arguments, fake_value
from hybridremat.graph.tracing.trace import TracedStep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Candidate:
    """A kernel, and the position among its node's inputs of what it would write over."""

    node: fx.Node
    place: int
    workspace: int

    @property
    def source(self) -> fx.Node:
        """What it would write over."""
        return self.node.all_input_nodes[self.place]


def with_rewrites(step: TracedStep, store: KernelStore) -> TracedStep:
    """The same step with what each op may overwrite, tried where the store does not know.

    Raises
    ------
    MeasurementError
        If no memory is left to try a kernel.
    """
    kernels = distinct_kernels(step)
    found: dict[int, list[tuple[int, str]]] = {}
    candidates: dict[str, _Candidate] = {}
    for op in step.graph.ops:
        node, key = step.op_nodes[op.id], kernels.key_of[op.id]
        if not key or not op.recomputable or is_random(node) or has_effects(node):
            continue
        for value, source in overwritable(step, op.id):
            place = node.all_input_nodes.index(source)
            name = f"{key} of {distinct_arguments(node)} over {place}"
            candidates.setdefault(name, _Candidate(node, place, op.temp))
            found.setdefault(op.id, []).append((value, name))
    missing = {name: each for name, each in candidates.items() if store.in_place(name) is None}
    store.add_in_place(_try_all(missing, kernels))
    ops = tuple(
        replace(op, overwrites=tuple(v for v, name in found.get(op.id, ()) if store.in_place(name)))
        for op in step.graph.ops
    )
    return replace(step, graph=replace(step.graph, ops=ops))


def _try_all(candidates: Mapping[str, _Candidate], kernels: Kernels) -> dict[str, bool]:
    """Whether each candidate gives the same bits as the plain kernel, and allocates no more."""
    if kernels.device == "meta" or not candidates:
        return dict.fromkeys(candidates, False)
    with outside_tracing(), memory_errors():
        same = {name: _gives_same_bits(each) for name, each in candidates.items()}
        equal = [name for name, passed in same.items() if passed]
        figures = peaks_of([partial(_in_place_call, candidates[name]) for name in equal], kernels.device)
    for name, (peak, _) in zip(equal, figures, strict=True):
        same[name] = peak <= candidates[name].workspace
    for name in (name for name, passed in same.items() if not passed):
        logger.info("%s is not written over %s", candidates[name].node, candidates[name].source)
    return same


def _gives_same_bits(candidate: _Candidate) -> bool:
    try:
        plain, in_place = _calls(candidate)
        expected, result = plain(), in_place()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        logger.warning("%s cannot be tried alone, and overwrites nothing: %s", candidate.node, error)
        return False
    assert isinstance(expected, torch.Tensor) and isinstance(result, torch.Tensor)
    return result.stride() == expected.stride() and torch.equal(bits_of(result), bits_of(expected))


def _in_place_call(candidate: _Candidate) -> Callable[[], object]:
    return _calls(candidate)[1]


def _calls(candidate: _Candidate) -> tuple[Callable[[], object], Callable[[], object]]:
    """The plain call on random numbers, and the one that then writes over one of them."""
    node, form = candidate.node, in_place_form(candidate.node.target)
    assert form is not None and callable(node.target)
    given = random_inputs(node)
    args: Any = fx.map_arg(node.args, given.__getitem__)
    kwargs: Any = fx.map_arg(node.kwargs, given.__getitem__)
    keywords = form.keywords(kwargs, given[candidate.source])
    return partial(node.target, *args, **kwargs), partial(form.target, *args, **keywords)


def random_inputs(node: fx.Node) -> dict[fx.Node, Any]:
    """Random numbers for each input of a node; indices are in their range."""
    ranges = index_ranges(node)
    return {
        source: random_like(fake_value(source), seed, min(2, ranges.get(source, 2)))
        for seed, source in enumerate(node.all_input_nodes)
    }


def random_like(value: Any, seed: int, whole: int = 2) -> Any:
    """A tensor like the fake one: numbers of both signs, truths of both kinds, whole ones below ``whole``."""
    if not isinstance(value, torch.Tensor):
        return value
    source = torch.Generator(value.device).manual_seed(seed)
    extent = int(value.untyped_storage().nbytes()) // value.element_size()

    def draw(number: int) -> torch.Tensor:
        if value.dtype.is_floating_point or value.dtype.is_complex:
            drawn = value.dtype if value.element_size() > 1 else torch.float32  # nothing draws 8 bits
            numbers = torch.empty(number, dtype=drawn, device=value.device)
            return numbers.normal_(0, 3, generator=source).to(value.dtype)
        numbers = torch.randint(0, max(1, whole), (number,), device=value.device, generator=source)
        return numbers.to(value.dtype)

    base = repeated(extent, draw)
    return torch.as_strided(base, value.shape, value.stride(), int(value.storage_offset()))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as whole numbers of their bits, in the order of its dimensions."""
    return tensor.contiguous().reshape(-1).view(_WHOLE.get(tensor.element_size(), torch.uint8))


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element; compared as bytes they would take twice as long."""
