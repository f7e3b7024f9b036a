"""Try on the device whether a gradient made slice by slice has the same bits, and so what is made of it.

A slice of a whole tensor and a tensor of its own differ in their strides, which a kernel that reads them may
go by: all that read a slice are tried with both. As for ops in place, the same bits on random numbers are
strong evidence, not a proof.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import fx

from hybridremat.graph.costs.in_place_trials import bits_of, random_like
from hybridremat.graph.costs.index_ranges import index_ranges
from hybridremat.graph.costs.kernel_benchmarks import is_out_of_memory, memory_errors
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.tracing.gradient_slices import INPUT_GRADIENT, SlicedGradient
from hybridremat.graph.tracing.signature import distinct_arguments, fake_value, kernel_signature

logger = logging.getLogger(__name__)


def slices_tried(cache: bool) -> Callable[[SlicedGradient], bool]:
    """Whether a gradient may be made slice by slice, tried where the device's store does not know."""

    def proven(sliced: SlicedGradient) -> bool:
        device = sliced.gradient.meta["val"].device.type
        if device == "meta":
            return False
        store = KernelStore.for_device(device) if cache else KernelStore()
        name = _name(sliced)
        known = store.in_place(name)
        if known is None:
            known = _gives_same_bits(sliced)
            store.add_in_place({name: known})
            store.save()
        if not known:
            logger.info("%s is made whole: its slices have other bits", sliced.gradient)
        return known

    return proven


def _name(sliced: SlicedGradient) -> str:
    """The kernels of a trial: of the gradient, and of all that reads its slices."""
    readers = [
        f"{bounds}: {kernel_signature(reader)} of {distinct_arguments(reader)}"
        for part, bounds in sliced.slices.items()
        for reader in part.users
    ]
    return f"{kernel_signature(sliced.call)} by slices, {'; '.join(readers)}"


def _gives_same_bits(sliced: SlicedGradient) -> bool:
    with outside_tracing(), memory_errors():
        try:
            return _try(sliced)
        except Exception as error:  # a kernel that does not take these sizes
            if is_out_of_memory(error):
                raise
            logger.warning("%s cannot be tried by slices: %s", sliced.gradient, error)
            return False


def _try(sliced: SlicedGradient) -> bool:
    seeds = count()
    given: dict[fx.Node, Any] = {}

    def real(node: fx.Node) -> Any:
        if node not in given:
            places = min((index_ranges(user).get(node, 2) for user in node.users), default=2)
            given[node] = random_like(fake_value(node), next(seeds), places)
        return given[node]

    whole = _run(sliced.call, real)
    first = _call(sliced.call.target, sliced.without_input, {}, real)
    if not all(map(_equal, whole[1:], first[1:])):
        return False
    for part, (start, end) in sliced.slices.items():
        made = _call(INPUT_GRADIENT, sliced.arguments(part), {}, real)
        view = whole[0][:, start:end]
        if not torch.equal(bits_of(made), bits_of(view)):
            return False
        for reader in part.users:
            given[part] = view
            expected = _run(reader, real)
            given[part] = made
            if not all(map(_equal, _listed(expected), _listed(_run(reader, real)))):
                return False
        given.pop(part, None)
    return True


def _run(node: fx.Node, real: Any) -> Any:
    return _call(node.target, node.args, node.kwargs, real)


def _call(target: Any, args: Any, kwargs: Any, real: Any) -> Any:
    return target(*fx.map_arg(args, real), **fx.map_arg(kwargs, real))


def _listed(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _equal(one: Any, other: Any) -> bool:
    """Whether two results have the same bits and strides."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or one == other
    return one.stride() == other.stride() and torch.equal(bits_of(one), bits_of(other))
