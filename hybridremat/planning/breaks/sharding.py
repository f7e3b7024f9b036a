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

from torch import nn

from hybridremat.sequence.joined_graphs import Beside, PartPoint, StepPart


@dataclass(frozen=True)
class Shard:
    """Parameters that are gathered together: bytes.

    Attributes
    ----------
    gathered
        Of all of them, with padding.
    gradients
        Of the gradients that a backward makes.
    reduced
        Of the buffer in which they are reduced, with padding.
    copied
        Of copies of gradients, with padding, from which that buffer is filled.
    kept
        Of the part of it that stays on each rank.
    """

    gathered: int = 0
    gradients: int = 0
    reduced: int = 0
    copied: int = 0
    kept: int = 0

    @staticmethod
    def of(parameters: Iterable[nn.Parameter], ranks: int) -> Shard:
        """These parameters, split among ``ranks``."""
        every = list(dict.fromkeys(parameters))
        trained = [each for each in every if each.requires_grad]
        reduced = sum(_padded(each, ranks) for each in trained)
        uneven = [each for each in trained if each.device.type == "cpu" and _padded(each, ranks) > each.nbytes]
        return Shard(
            sum(_padded(each, ranks) for each in every),
            sum(each.nbytes for each in trained),
            reduced,
            sum(_padded(each, ranks) for each in uneven),
            reduced // ranks,
        )

    @property
    def reducing(self) -> int:
        """Most bytes while gradients are reduced, beside those that stay."""
        return max(self.gradients + self.filling - self.kept, self.reduced)

    @property
    def filling(self) -> int:
        """Bytes beside the gradients while the buffer is filled from them."""
        return self.reduced + self.copied


def _padded(parameter: nn.Parameter, ranks: int) -> int:
    """Bytes of a parameter whose first dimension is split evenly."""
    rows = parameter.shape[0] if parameter.ndim else 1
    return -(-rows // ranks) * ranks * (parameter.nbytes // max(1, rows))


@dataclass(frozen=True)
class Sharding:
    """What is gathered for each unit by name, and for the rest of the model."""

    units: Mapping[str, Shard]
    rest: Shard

    @staticmethod
    def of(model: nn.Module, units: Mapping[str, nn.Module], ranks: int) -> Sharding | None:
        """What ``fully_shard`` of the units and of the model makes of it; None on one rank."""
        if ranks == 1:
            return None
        own = {id(parameter) for unit in units.values() for parameter in unit.parameters()}
        rest = [each for each in model.parameters() if id(each) not in own]
        return Sharding(
            {name: Shard.of(unit.parameters(), ranks) for name, unit in units.items()}, Shard.of(rest, ranks)
        )


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

    sharding: Sharding
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
    walk = _Walk(sharding, [_with_shards_left(part, n, entries, sharding) for n, part in enumerate(parts)])
    for late in reversed([each for each in entries if each.unit and not each.reduces]):
        walk.add_peaks(0, sharding.units[late.unit].filling)
    walk.add_peaks(2 * rest, sharding.rest.filling)
    for entry, (before, during), (after, inside, reducing) in zip(entries, forward, backward, strict=True):
        if entry.unit:
            walk.add_peaks(before, reducing)
        walk.add(entry.part, Beside(during, inside))
        if entry.unit:
            walk.add_peaks(0, after)
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


def _forward_levels(entries: Sequence[Entry], sharding: Sharding) -> list[tuple[int, int]]:
    """For each entry, what FSDP2 holds at most while its unit is gathered, and while it runs."""
    rest = held = sharding.rest.gathered
    found = []
    for entry in entries:
        if not entry.unit:
            found.append((0, rest + held))
            continue
        own = sharding.units[entry.unit].gathered
        found.append((rest + own + max(held, own), rest + own + own))
        held = own
    return found


def _backward_levels(entries: Sequence[Entry], sharding: Sharding) -> list[tuple[int, int, int]]:
    """For each entry, what FSDP2 holds while its unit is gathered, while it runs, and while it reduces."""
    rest, reducing = sharding.rest.gathered, 0
    ahead = [sharding.units[each.unit].gathered for each in entries if each.unit]
    found, after = [], ahead[-1] if rest and ahead else 0
    for entry in reversed(entries):
        if not entry.unit:
            found.append((0, rest + reducing + after, 0))
            continue
        own = sharding.units[entry.unit]
        ahead.pop()
        after = ahead[-1] if ahead else 0
        gathering = rest + reducing + own.gathered + max(own.gathered, after) + entry.takes
        running = rest + reducing + own.gathered + after
        if entry.reduces:
            found.append((gathering, running, rest + after + own.reducing + entry.passes))
            reducing = own.reduced
        else:
            found.append((gathering, running, 0))
            rest += own.gathered
    return found[::-1]
