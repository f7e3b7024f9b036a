"""What FSDP2 (``fully_shard`` of the units, then of the model) holds beside the graphs of a step.

Parameters of a unit are gathered before its forward and once more before its backward, into one buffer for
the collective and from there into the parameters; its gradients are copied into one buffer that is reduced
and scattered. With R the gathered parameters of the rest of the model, and for each unit P its gathered
parameters (as many as its buffer), G its gradients, S the buffer in which they are reduced and K the part
that stays, FSDP2 holds, on one stream and with what it prefetches by default:

- in the forward: R, the buffer that was gathered last (freed when the next one has been copied out: while a
  unit is gathered there are both, and its P), and in a unit its P;
- in the backward: R, the buffer of the unit that comes next (gathered ahead), the S of the unit before
  (freed when the next one begins to reduce), and in a unit its P;
- while a unit reduces: its G and S, without its P;
- at the end: the gradients of the rest, the buffer in which they are reduced, without R.

Gathers and reductions are sections of the step of their own. A unit whose inputs have no gradients (token
ids) reduces at the end of the backward, and is gathered until then. Buffers are padded: each parameter's
first dimension is split evenly, and on the CPU a gradient for which that adds rows is copied before it goes
into the buffer. Without parameters in the rest, the last unit is not gathered ahead. Units that stay
gathered after the forward (``reshard_after_forward=False``) go with their first reduction, and are gathered
again for what else they run in the backward. Units of one group (``fully_shard([norm, head])``) count as one,
called once: it is gathered before the first of them, and reduces after the backward of that one. The order is
that of ``torch.distributed.fsdp._fully_shard``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from hybridremat.graph.costs.device_specs import DeviceSpec
from hybridremat.planning.breaks.shards import Shard
from hybridremat.plans.fsdp import Fsdp
from hybridremat.sequence.joined_graphs import Beside, PartPoint, StepPart


@dataclass(frozen=True)
class Trained:
    """What a step runs, and makes gradients of.

    Attributes
    ----------
    parameters
        Identities of the parameters with gradients, those of code between graphs too.
    gradients
        By fingerprint of a graph, bytes of the gradients of parameters that its backward makes.
    late
        For each graph of the step, whether its unit waits for the end of the backward to reduce.
    calls
        For each graph of the step, the number of the call of a unit that it is in; 0 outside of units. Calls
        of units that are gathered together, one after the other, are one.
    completes
        For each graph of the step, whether its backward is the last one to add to some parameter's gradient.
    breaks
        For each graph of the step, whether code of its unit follows.
    """

    parameters: frozenset[int]
    gradients: Mapping[str, int]
    late: tuple[bool, ...]
    calls: tuple[int, ...]
    completes: tuple[bool, ...]
    breaks: tuple[bool, ...]


@dataclass(frozen=True)
class Sharding:
    """What is gathered for each unit by name, and for the rest of the model.

    Attributes
    ----------
    units
        Those that are gathered together are one, under the name of the first.
    rest
        Of the model.
    kept
        Units that stay gathered between forward and backward.
    heads
        For each unit by name, the one under whose name it is gathered.
    trained
        What the step trains.
    """

    units: Mapping[str, Shard]
    rest: Shard
    kept: frozenset[str]
    heads: Mapping[str, str]
    trained: Trained

    @staticmethod
    def of(
        model: nn.Module,
        units: Mapping[str, nn.Module],
        fsdp: Fsdp,
        trained: Trained,
        spec: DeviceSpec | None = None,
    ) -> Sharding:
        """What ``fully_shard`` of the units and of the model makes of it, here or on ``spec``'s device."""
        own = {id(parameter) for unit in units.values() for parameter in unit.parameters()}
        rest = [each for each in model.parameters() if id(each) not in own]
        heads, used = gathered_together(units, fsdp.tail), trained.parameters
        groups: dict[str, list[nn.Parameter]] = {}
        for name, unit in units.items():
            groups.setdefault(heads[name], []).extend(unit.parameters())
        made = {name: Shard.of(each, fsdp, used, spec) for name, each in groups.items()}
        kept = {heads[each] for each in fsdp.tail} if fsdp.reshard_after_forward else made.keys()
        return Sharding(made, Shard.of(rest, fsdp, used, spec), frozenset(kept), heads, trained)


def gathered_together(units: Iterable[str], tail: Sequence[str]) -> dict[str, str]:
    """For each unit by name, the one under whose name it is gathered: the first of the tail for all of it."""
    return {name: tail[0] if name in tail else name for name in units}


@dataclass(frozen=True)
class Entry:
    """A part of the step where it runs.

    Attributes
    ----------
    part
        Its number.
    unit
        The unit that it is of; empty for the rest.
    call
        The number of the call of that unit; 0 for the rest.
    is_code
        Whether it is code between graphs, which may be of the unit after it.
    breaks
        Whether code of its unit follows.
    hands_on
        Whether its backward hands on gradients: then its unit may reduce right after it.
    completes
        Whether its backward is the last one to add to some parameter's gradient.
    gradients
        Bytes of the gradients of parameters that its backward makes; code between graphs: that it leaves.
    passes, takes
        Bytes of gradients that its backward hands to the next one, and that it is handed.
    """

    part: int
    unit: str = ""
    call: int = 0
    is_code: bool = False
    breaks: bool = False
    hands_on: bool = True
    completes: bool = False
    gradients: int = 0
    passes: int = 0
    takes: int = 0


def with_sharding(
    parts: Sequence[StepPart], entries: Sequence[Entry], sharding: Sharding
) -> tuple[tuple[StepPart, ...], tuple[int, ...], tuple[Beside, ...]]:
    """The parts of a step, their order and what is beside each, with what FSDP2 holds and does.

    Parameters
    ----------
    parts
        Those of the step, with all gradients in full.
    entries
        Them in the order of the forward.
    """
    made, sections = list(parts), list[tuple[int, Beside]]()

    def add_own(forward: int, backward: int, reduced: int = 0) -> None:
        """A section of FSDP's own: what it takes; after its backward, so many bytes of gradients are gone."""
        sections.append((len(made), Beside()))
        made.append(StepPart((PartPoint(forward, backward, 0, time=0),), -reduced))

    ends = _ends(entries)
    forward, backward = _forward_levels(entries, ends, sharding), _Backward(entries, ends, sharding)
    for ending in reversed(backward.endings()):
        add_own(*ending)
    add_own(sharding.rest.gathering, *backward.rest_ending())
    for entry, end, before, after in zip(entries, ends, forward, backward.levels, strict=True):
        if end.opens:
            add_own(before.gathering, after.reducing, after.reduced)
        sections.append((entry.part, Beside(before.running, after.running)))
        if end.closes:
            add_own(0, after.gathering)
    add_own(0, backward.beginning)
    order, beside = zip(*sections, strict=True)
    return tuple(made), order, beside


@dataclass(frozen=True)
class _End:
    """How an entry lies in the calls of units.

    Attributes
    ----------
    opens, closes
        Whether it is the first, and the last graph of a call.
    again
        Whether its unit has been called before.
    before
        The unit that was called before it.
    """

    opens: bool
    closes: bool
    again: bool
    before: str


def _ends(entries: Sequence[Entry]) -> list[_End]:
    """How the entries of a step lie in the calls of units."""
    calls = [each.call for each in entries]
    after = [*calls[1:], 0]  # of the next graph
    for place in reversed(range(len(entries) - 1)):
        if entries[place + 1].is_code:
            after[place] = after[place + 1]
    found, latest, called = [], 0, [""]
    for place, entry in enumerate(entries):
        opens = bool(entry.call) and entry.call != latest
        if opens:
            called.append(entry.unit)
            latest = entry.call
        closes = bool(entry.call) and after[place] != entry.call
        found.append(_End(opens, closes, entry.unit in called[:-1], called[-2] if called[1:] else ""))
    return found


@dataclass(frozen=True)
class _Levels:
    """Bytes that FSDP2 holds at an entry: while its unit is gathered, while it runs, and while it reduces.

    ``reduced``: bytes of gradients that are gone when its unit has reduced.
    """

    gathering: int = 0
    running: int = 0
    reducing: int = 0
    reduced: int = 0


@dataclass
class _Gathered:
    """The rest of the model, and the units that are gathered with it."""

    sharding: Sharding
    entries: Sequence[Entry]
    names: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        """Of all of them."""
        units = self.sharding.units
        return self.sharding.rest.gathered + sum(units[name].gathered for name in self.names)

    def around(self, place: int) -> int:
        """Bytes that are gathered for the unit that code between graphs may be of, if it is of one."""
        if not self.entries[place].is_code:
            return 0
        before, after = self._next(range(place - 1, -1, -1)), self._next(range(place + 1, len(self.entries)))
        near = {before.unit if before.breaks else "", after.unit} - self.names - {""}
        return max((self.sharding.units[name].gathered for name in near), default=0)

    def _next(self, places: Iterable[int]) -> Entry:
        """The first graph at these places."""
        return next((self.entries[n] for n in places if not self.entries[n].is_code), Entry(0))


def _forward_levels(entries: Sequence[Entry], ends: Sequence[_End], sharding: Sharding) -> list[_Levels]:
    """What FSDP2 holds in the forward."""
    there, held, found = _Gathered(sharding, entries), sharding.rest.buffer, []
    for place, (entry, end) in enumerate(zip(entries, ends, strict=True)):
        gathering = 0
        if end.opens and entry.unit not in there.names:
            own = sharding.units[entry.unit]
            gathering, held = there.bytes + held + own.gathering, own.buffer
            there.names.add(entry.unit)
        found.append(_Levels(gathering, there.bytes + held + there.around(place)))
        if end.closes and entry.unit not in sharding.kept:
            there.names.discard(entry.unit)
    return found


class _Backward:
    """What FSDP2 holds in the backward, entry by entry from the last to the first.

    Attributes
    ----------
    beginning
        Bytes while the last unit is gathered ahead.
    levels
        At each entry, in the order of the forward.
    """

    def __init__(self, entries: Sequence[Entry], ends: Sequence[_End], sharding: Sharding) -> None:
        self._entries, self._ends, self._sharding = entries, ends, sharding
        self._there = _Gathered(sharding, entries)
        self._there.names |= {each.unit for each in entries} & sharding.kept
        self._ahead = Shard()
        self._reduced = 0  # bytes of the buffer in which gradients were reduced last
        self._made: Counter[str] = Counter()  # bytes of gradients in full by unit, until it has reduced
        if sharding.rest.gathered:
            self._gather_ahead(next((each.unit for each in reversed(entries) if each.unit), ""))
        self.beginning = self._there.bytes + self._ahead.ahead
        self.levels = [self._at(place) for place in reversed(range(len(entries)))][::-1]

    def rest_ending(self) -> tuple[int, int]:
        """Most bytes while the rest of the model reduces, beside late units, and bytes that are gone then."""
        rest = self._sharding.rest
        made = min(rest.gradients, sum(each.gradients for each in self._entries if not each.unit))
        return self._late(self._there.names) + rest.reducing(made), made - rest.kept

    def endings(self) -> list[tuple[int, int, int]]:
        """Sections of the late units, which reduce after it, as they come in the backward."""
        found, left = [], [name for name in self._sharding.units if name in self._there.names]
        while left:
            own = self._sharding.units[left[0]]
            made = self._made[left.pop(0)]
            found.append((0, self._late(left) + own.reducing(made), made - own.kept))
        return found

    def _late(self, names: Iterable[str]) -> int:
        return sum(self._sharding.units[name].gathered for name in names)

    def _gather_ahead(self, unit: str) -> None:
        self._ahead = self._sharding.units[unit] if unit and unit not in self._there.names else Shard()

    def _at(self, place: int) -> _Levels:
        entry, end = self._entries[place], self._ends[place]
        gathering = self._gathering(entry, end) if end.closes else 0
        running = self._there.bytes + self._reduced + self._ahead.buffer + self._there.around(place)
        self._made[entry.unit] += entry.gradients
        reducing, reduced = self._reducing(entry, end) if end.opens else (0, 0)
        return _Levels(gathering, running, reducing, reduced)

    def _gathering(self, entry: Entry, end: _End) -> int:
        """Most bytes before the backward of a call: its unit is gathered, and the one before it ahead."""
        own, base = self._sharding.units[entry.unit], self._there.bytes + self._reduced
        is_there = entry.unit in self._there.names
        self._there.names.add(entry.unit)
        self._gather_ahead(end.before)
        ahead = self._ahead.ahead
        return base + entry.takes + (ahead if is_there else max(own.gathering, own.gathered + ahead))

    def _reducing(self, entry: Entry, end: _End) -> tuple[int, int]:
        """Most bytes after the backward of a call, and those of gradients that are gone then.

        What other calls add to as well is not reduced before they have.
        """
        if not entry.hands_on:
            return 0, 0
        self._there.names.discard(entry.unit)
        own, made = self._sharding.units[entry.unit], self._made[entry.unit]
        base, self._reduced = self._there.bytes + self._ahead.buffer + entry.passes, 0
        if not entry.completes:
            return base, 0
        self._reduced = own.reduced
        reducing = base + own.reducing(made)
        if end.again:
            return reducing, 0
        del self._made[entry.unit]
        return reducing, made - own.kept
