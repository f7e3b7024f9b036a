"""What FSDP2 (``fully_shard`` of the units, then of the model) holds beside the graphs of a step.

Parameters of a unit are gathered before its forward and once more before its backward, into one buffer for
the collective and from there into the parameters; its gradients are copied into one buffer that is reduced
and scattered. With R the gathered parameters of the rest of the model, and for each unit P its gathered
parameters (as many as its buffer), G its gradients, S the buffer in which they are reduced and K the part
that stays, FSDP2 holds, on one stream and with what it prefetches by default:

- in the forward: R, the buffer that was gathered last (freed when the next one has been copied out), and
  in a unit its P;
- in the backward: R, the buffer of the unit that comes next (gathered ahead), the S of the unit before
  (freed when the next one begins to reduce), and in a unit its P;
- while a unit reduces: its G and S, without its P;
- at the end: the gradients of the rest, the buffer in which they are reduced, without R.

Gathers and reductions are sections of the step of their own. A unit whose inputs have no gradients (token
ids) reduces at the end of the backward, and is gathered until then. Buffers are padded: each parameter's
first dimension is split evenly, and on the CPU a gradient for which that adds rows is copied before it goes
into the buffer. Without parameters in the rest, the last unit is not gathered ahead. Sizes and order are
those of ``torch.distributed.fsdp._fully_shard``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from hybridremat.compiler.model_state import Gathered, in_dtype
from hybridremat.graph.costs.collectives import scatters_a_copy
from hybridremat.plans.fsdp import Fsdp
from hybridremat.sequence.joined_graphs import Beside, PartPoint, StepPart


@dataclass(frozen=True)
class Shard:
    """Parameters that are gathered together: bytes.

    Attributes
    ----------
    gathered
        Of all of them, with padding.
    buffer
        Of the buffer into which they are gathered first; none on one rank.
    gradients
        Of the gradients that a backward makes.
    reduced
        Of the buffer in which they are reduced, with padding.
    copied
        Of copies of gradients, with padding, from which that buffer is filled.
    kept
        Of the gradients that stay on each rank.
    cast
        Of this rank's part of the parameters in the dtype in which they are gathered, if it is another.
    scattered
        Of this rank's part of the gradients as they are reduced, if that is not what stays.
    again
        Of a copy of the reduced buffer that the backend makes while it reduces.
    """

    gathered: int = 0
    buffer: int = 0
    gradients: int = 0
    reduced: int = 0
    copied: int = 0
    kept: int = 0
    cast: int = 0
    scattered: int = 0
    again: int = 0

    @staticmethod
    def of(parameters: Iterable[nn.Parameter], fsdp: Fsdp) -> Shard:
        """These parameters, as they are split."""
        every = [_local(each) for each in dict.fromkeys(parameters)]
        trained = [each for each in every if each.requires_grad]
        ranks, gathers, reduces = fsdp.ranks, gathered_dtype(fsdp), _dtype(fsdp.reduce_dtype)
        uneven = [each for each in trained if each.device.type == "cpu" and _padding(each, ranks)]
        gathered = sum(_padded(each, ranks, gathers) for each in every)
        reduced = sum(_padded(each, ranks, reduces or gathers) for each in trained)
        own = sum(_padded(each, ranks, None) for each in trained)
        return Shard(
            gathered,
            gathered if ranks > 1 else 0,
            sum(each.numel() * _itemsize(each, gathers) for each in trained),
            reduced,
            sum(_padded(each, ranks, gathers) for each in uneven),
            own // ranks,
            0 if gathers is None else gathered // ranks,
            0 if own == reduced else reduced // ranks,
            reduced if ranks > 1 and any(scatters_a_copy(each.device.type) for each in trained) else 0,
        )

    @property
    def reducing(self) -> int:
        """Most bytes while gradients are reduced, beside those that stay."""
        return max(self.gradients + self.filling - self.kept, self.reduced + self.scattered + self.again)

    @property
    def ending(self) -> int:
        """Most bytes while gradients are reduced that count in full to the end."""
        return self.reducing + self.kept - self.gradients

    @property
    def filling(self) -> int:
        """Bytes beside the gradients while the buffer is filled from them."""
        return self.reduced + self.copied


def _local(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter that is split by tensors, or the whole one."""
    local = getattr(parameter, "to_local", None)
    return parameter if local is None else local().detach().requires_grad_(parameter.requires_grad)


def as_gathered(fsdp: Fsdp | None) -> Gathered | None:
    """What FSDP2 makes of a parameter: in its dtype, at the beginning of memory with the padding."""
    if fsdp is None:
        return None
    dtype, ranks = gathered_dtype(fsdp), fsdp.ranks

    def gathered(parameter: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = in_dtype(parameter, dtype)
        more = _padding(found, ranks)
        if not more or not found.is_contiguous():
            return found
        padded = found.new_empty(_padded(found, ranks, None) // found.itemsize)
        padded[: found.numel()].copy_(found.flatten())
        return padded.as_strided(found.size(), found.stride())

    return gathered


def gathered_dtype(fsdp: Fsdp | None) -> torch.dtype | None:
    """The dtype in which parameters are gathered; None for their own."""
    return None if fsdp is None else _dtype(fsdp.param_dtype)


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def _itemsize(parameter: torch.Tensor, dtype: torch.dtype | None) -> int:
    return (dtype or parameter.dtype).itemsize


def _padding(parameter: torch.Tensor, ranks: int) -> int:
    """Rows that are added to a parameter, so that its first dimension is split evenly."""
    return -(parameter.shape[0] if parameter.ndim else 1) % ranks


def _padded(parameter: torch.Tensor, ranks: int, dtype: torch.dtype | None) -> int:
    """Bytes of a parameter with these rows."""
    rows = parameter.shape[0] if parameter.ndim else 1
    numbers = parameter.numel() // max(1, rows) * (rows + _padding(parameter, ranks))
    return numbers * _itemsize(parameter, dtype)


@dataclass(frozen=True)
class Sharding:
    """What is gathered for each unit by name, and for the rest of the model.

    ``reshards``: units are gathered again for their backward.
    """

    units: Mapping[str, Shard]
    rest: Shard
    reshards: bool = True

    @staticmethod
    def of(model: nn.Module, units: Mapping[str, nn.Module], fsdp: Fsdp | None) -> Sharding | None:
        """What ``fully_shard`` of the units and of the model makes of it; None if nothing is sharded."""
        if fsdp is None:
            return None
        own = {id(parameter) for unit in units.values() for parameter in unit.parameters()}
        rest = [each for each in model.parameters() if id(each) not in own]
        made = {name: Shard.of(unit.parameters(), fsdp) for name, unit in units.items()}
        return Sharding(made, Shard.of(rest, fsdp), fsdp.reshard_after_forward)


@dataclass(frozen=True)
class Entry:
    """A part of the step where it runs.

    Attributes
    ----------
    part
        Its number.
    unit
        The unit that it is of; empty for the rest.
    reduces
        Whether the unit reduces right after its backward.
    passes, takes
        Bytes of gradients that its backward hands to the next one, and that it is handed.
    """

    part: int
    unit: str = ""
    reduces: bool = True
    passes: int = 0
    takes: int = 0


@dataclass
class _Walk:
    """The sections of a step as they are met, with what is gathered and reduced between them."""

    parts: list[StepPart]
    sections: list[tuple[int, Beside]] = field(default_factory=list)

    def add(self, part: int, beside: Beside) -> None:
        self.sections.append((part, beside))

    def add_peaks(self, forward: int, backward: int) -> None:
        """A section of FSDP's own: it takes so many bytes, and leaves none."""
        self.sections.append((len(self.parts), Beside()))
        self.parts.append(StepPart((PartPoint(forward, backward, 0, time=0),), 0))


def with_sharding(
    parts: Sequence[StepPart], entries: Sequence[Entry], sharding: Sharding
) -> tuple[tuple[StepPart, ...], tuple[int, ...], tuple[Beside, ...]]:
    """The parts of a step, their order and what is beside each, with what FSDP2 holds and does.

    Parameters
    ----------
    parts
        Those of the step, with all gradients of units in full.
    entries
        Them in the order of the forward.
    """
    rest = sharding.rest.gathered
    forward = _forward_levels(entries, sharding)
    backward = _backward_levels(entries, sharding)
    walk = _Walk([_with_shards_left(part, n, entries, sharding) for n, part in enumerate(parts)])
    for late in reversed([each for each in entries if each.unit and not each.reduces]):
        walk.add_peaks(0, sharding.units[late.unit].ending)
    walk.add_peaks(sharding.rest.buffer + max(rest, sharding.rest.cast), sharding.rest.ending)
    for entry, (before, during), (after, inside, reducing) in zip(entries, forward, backward, strict=True):
        if entry.unit:
            walk.add_peaks(before, reducing)
        walk.add(entry.part, Beside(during, inside))
        if entry.unit:
            walk.add_peaks(0, after)
    walk.add_peaks(0, _first_gather(sharding, [sharding.units[each.unit] for each in entries if each.unit]))
    order, beside = zip(*walk.sections, strict=True)
    return tuple(walk.parts), order, beside


def _with_shards_left(
    part: StepPart, number: int, entries: Sequence[Entry], sharding: Sharding
) -> StepPart:
    """A part of which each rank keeps a share of the gradients that its unit has reduced."""
    entry = next((each for each in entries if each.part == number), None)
    if entry is None or not entry.unit or not entry.reduces:
        return part
    own = sharding.units[entry.unit]
    return replace(part, gradient_bytes=part.gradient_bytes - own.gradients + own.kept)


def _first_gather(sharding: Sharding, units: Sequence[Shard]) -> int:
    """Bytes while the last unit is gathered ahead, as the backward begins."""
    rest = sharding.rest.gathered
    if not sharding.reshards:
        return rest + sum(each.gathered for each in units)
    return rest + units[-1].buffer + units[-1].cast if rest and units else rest


def _forward_levels(entries: Sequence[Entry], sharding: Sharding) -> list[tuple[int, int]]:
    """For each entry, what FSDP2 holds at most while its unit is gathered, and while it runs."""
    rest, held = sharding.rest.gathered, sharding.rest.buffer
    found = []
    for entry in entries:
        if not entry.unit:
            found.append((0, rest + held))
            continue
        own = sharding.units[entry.unit]
        gathering = own.buffer + max(held + own.cast, own.gathered)
        found.append((rest + gathering, rest + own.buffer + own.gathered))
        held = own.buffer
        rest += 0 if sharding.reshards else own.gathered
    return found


def _backward_levels(entries: Sequence[Entry], sharding: Sharding) -> list[tuple[int, int, int]]:
    """For each entry, what FSDP2 holds while its unit is gathered, while it runs, and while it reduces."""
    rest, reducing = sharding.rest.gathered, 0
    own = [sharding.units[each.unit] for each in entries if each.unit]
    if not sharding.reshards:
        rest += sum(each.gathered for each in own)
        own = [replace(each, gathered=0, buffer=0, cast=0) for each in own]
    freed = {name: 0 if sharding.reshards else each.gathered for name, each in sharding.units.items()}
    found, after = [], own[-1].buffer if sharding.rest.gathered and own else 0
    for entry in reversed(entries):
        if not entry.unit:
            found.append((0, rest + reducing + after, 0))
            continue
        unit = own.pop()
        after = own[-1].buffer if own else 0
        ahead = after + own[-1].cast if own else 0
        gathering = max(unit.gathered + max(unit.buffer, ahead), unit.buffer + unit.cast)
        running = rest + reducing + unit.gathered + after
        gathering += rest + reducing + entry.takes
        if entry.reduces:
            rest -= freed[entry.unit]
            found.append((gathering, running, rest + after + unit.reducing + entry.passes))
            reducing = unit.reduced
        else:
            found.append((gathering, running, 0))
            rest += unit.gathered
    return found[::-1]
