"""An opaque call as trials on made-up numbers have shown it: its results, what it keeps, its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hybridremat.errors import CaptureError
from hybridremat.graph.opaque.places import Description, Layout, Place, describe
from hybridremat.graph.opaque.region import Region
from hybridremat.graph.opaque.template import Run, Template, run
from hybridremat.graph.outside import outside_tracing


@dataclass(frozen=True)
class Gradients:
    """What one backward returns: where each input's gradient lives, among grads, kept and new storages.

    ``copied``: which of the grads that are there and of what is kept it writes over; it gets copies of these.
    """

    described: Description
    copied: frozenset[int]


@dataclass
class OpaqueOp:
    """A call, its ops and all that is known of it from a trial on made-up numbers.

    ``kept_inputs`` and ``kept_new``: which inputs and new storages its backward is given.
    """

    region: Region
    template: Template
    described: Description
    results: tuple[Any, ...]
    structure: Any
    random: bool
    has_contexts: bool
    gradients: dict[object, Gradients] = field(default_factory=dict)
    forward: Any = None
    backward: Any = None

    @property
    def _kept_places(self) -> tuple[Place, ...]:
        places = self.described.places[len(self.results) :]
        return tuple(place for place in places if place is not None)

    @property
    def kept_inputs(self) -> list[int]:
        """The inputs that the backward is given."""
        return sorted({place.index for place in self._kept_places if not place.new})

    @property
    def kept_new(self) -> list[int]:
        """The new storages that it is given, after them."""
        return sorted({place.index for place in self._kept_places if place.new})

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The new storages of one forward."""
        done = run(self.region, inputs, contexts=self.has_contexts)
        self.template.require_same(done)
        return self.described.new_in(done.tensors, inputs)

    def run_backward(self, grads: Sequence[Tensor | None], kept: Sequence[Tensor]) -> list[Tensor]:
        """The new storages of one backward."""
        known = self.gradients_for(grads)
        given = [*(grad for grad in grads if grad is not None), *kept]
        copies = [each.clone() if place in known.copied else each for place, each in enumerate(given)]
        found = self._gradients(grads, copies)
        return known.described.new_in(found, copies)

    def _gradients(self, grads: Sequence[Tensor | None], given: Sequence[Tensor]) -> list[Tensor | None]:
        left = list(given)
        there = [None if grad is None else left.pop(0) for grad in grads]
        where = {(False, index): place for place, index in enumerate(self.kept_inputs)}
        where |= {(True, index): place + len(where) for place, index in enumerate(self.kept_new)}
        tensors = [place.of(left[where[place.new, place.index]]) for place in self._kept_places]
        return self.template.backward(there, tensors)

    def gradients_for(self, grads: Sequence[Tensor | None]) -> Gradients:
        """What a backward with such gradients returns; from a trial, the first time."""
        key = tuple(None if grad is None else Layout.of(grad) for grad in grads)
        if key not in self.gradients:
            with outside_tracing():
                self.gradients[key] = self._try_backward(key)
        return self.gradients[key]

    def _try_backward(self, layouts: Sequence[Layout | None]) -> Gradients:
        grads = [None if each is None else each.made_up() for each in layouts]
        given = [*(grad for grad in grads if grad is not None), *self.made_up_kept()]
        before = [each.clone() for each in given]
        state = torch.get_rng_state()
        found = self._gradients(grads, given)
        if not torch.equal(state, torch.get_rng_state()):
            raise CaptureError(f"the backward of {self.region.name} is random: it cannot be one op")
        changed = {i for i, (old, new) in enumerate(zip(before, given, strict=True)) if not _same(old, new)}
        if not changed or self._is_scratch(changed, grads, given, found):
            return Gradients(describe(found, given), frozenset())
        copies = [each.clone() if place in changed else each for place, each in enumerate(before)]
        left = [place for place in range(len(copies)) if place not in changed]
        described = describe(self._gradients(grads, copies), [copies[place] for place in left])
        return Gradients(_among(described, left), frozenset(changed))

    def _is_scratch(
        self,
        changed: set[int],
        grads: Sequence[Tensor | None],
        given: Sequence[Tensor],
        found: Sequence[Tensor | None],
    ) -> bool:
        """Whether what a backward writes into is memory of its own that nothing depends on.

        oneDNN leaves part of the workspace of its recurrent kernels to their backward.
        """
        results = {place.index for place in self.described.places[: len(self.results)] if place is not None}
        first = len(given) - len(self.kept_new)
        if not all(place >= first and self.kept_new[place - first] not in results for place in changed):
            return False
        before = [None if each is None else each.clone() for each in found]
        again = self._gradients(grads, given)
        pairs = zip(before, again, strict=True)
        return all(new is None if old is None else new is not None and _same(old, new) for old, new in pairs)

    def made_up_kept(self, sources: Sequence[object] = ()) -> list[Tensor]:
        """What the backward is given after a forward on made-up numbers.

        ``sources``: what stands for each in a graph; equal ones are one tensor, for which kernels may take
        more memory than for two.
        """
        inputs = [each.layout.made_up() for each in self.region.inputs]
        first: dict[object, Tensor] = {}
        for index, source in zip(self.kept_inputs, sources, strict=False):
            inputs[index] = first.setdefault(source, inputs[index])
        new = self.run(inputs)
        return [*(inputs[i] for i in self.kept_inputs), *(new[i] for i in self.kept_new)]


def _among(described: Description, given: Sequence[int]) -> Description:
    """Places counted among all that was given, from places among some of it."""
    places = tuple(
        p if p is None or p.new else Place(False, given[p.index], p.size, p.stride, p.offset)
        for p in described.places
    )
    return Description(places, described.new)


def _same(old: Tensor, new: Tensor) -> bool:
    return bool(((old == new) | ((old != old) & (new != new))).all())


def _casting_alone(region: Region, inputs: Sequence[Tensor]) -> Region:
    """The call without autocast's cache, if it casts no leaf twice.

    What the cache takes stays in it to the end of autocast, and each run's inputs are new to it.
    """
    if not any(each.enabled for each in region.autocast):
        return region
    alone = replace(region, keeps_casts=False)
    return alone if run(alone, inputs).num_nodes == run(region, inputs).num_nodes else region


def tried(region: Region) -> OpaqueOp:
    """A region that has been tried.

    Raises
    ------
    CaptureError
        If it cannot be one op.
    """
    inputs = [each.layout.made_up() for each in region.inputs]
    before = [each.clone() for each in inputs]
    state = torch.get_rng_state()
    try:
        region = _casting_alone(region, inputs)
        done: Run = run(region, inputs)
    except RuntimeError as error:
        raise CaptureError(f"{region.name} cannot be tried on made-up numbers: {error}") from error
    if not all(_same(old, new) for old, new in zip(before, inputs, strict=True)):
        raise CaptureError(f"{region.name} writes into what it is given; it cannot be one op")
    described = describe(done.tensors, inputs)
    places = described.places[: len(done.results)]
    if any(place is not None and not place.new for place in places):
        raise CaptureError(f"{region.name} returns a view of what it is given; it cannot be one op")
    op = OpaqueOp(
        region,
        Template(done),
        described,
        tuple(None if isinstance(leaf, Tensor) else leaf for leaf in done.results),
        done.structure,
        not torch.equal(state, torch.get_rng_state()),
        bool(done.contexts),
    )
    for each in inputs:  # the template's leaves stay, but their memory
        storage = each.untyped_storage()
        if storage.resizable():
            storage.resize_(0)
        else:  # NumPy has seen it
            each.data = each.new_empty(1).as_strided(each.shape, [0] * each.dim())
    return op
