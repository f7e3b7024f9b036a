"""Which parameters a surveyed step makes gradients of, and in which call of which unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from hybridremat.errors import CaptureError, ModelError
from hybridremat.graph.tracing.trace import gradients_at, trained_inputs
from hybridremat.planning.breaks.sharding import Trained
from hybridremat.planning.breaks.survey import Survey


def trained_in(survey: Survey, units: Mapping[str, nn.Module], tail: Sequence[str]) -> Trained:
    """What the path that a survey took last makes gradients of; ``tail``: units that are one group.

    Raises
    ------
    ModelError
        If the tail does not run as one.
    """
    counterparts = _Counterparts(units)
    gradients, late = dict.fromkeys(survey.order, 0), set[str]()
    first: dict[int, int] = {}  # the call in which a parameter is used first
    calls, continues = _joined(survey, tail)
    for graph, unit, call in zip(survey.ran, survey.units, calls, strict=True):
        step = survey.traced[graph.key]
        places = trained_inputs(step)
        for place in places & graph.parameters.keys():
            first.setdefault(counterparts.of(graph.parameters[place], unit), call)
        made = gradients_at(step, graph.parameters)
        gradients[graph.key] = sum(step.graph.values[value].bytes for value in made)
        if places <= graph.parameters.keys():
            late.add(graph.key)
    ends, ran = set(first.values()), list(zip(survey.order, survey.units, strict=True))
    begins = next((key for key, unit in ran if unit in tail), "")
    if tail:
        _require_one_pass(survey, calls, tail, in_a_row=begins not in late)
    return Trained(
        frozenset(survey.leaves | first.keys()),
        gradients,
        tuple((begins if unit in tail else key) in late for key, unit in ran),
        calls,
        tuple(call in ends for call in calls),
        tuple(ending is not None or place in continues for place, ending in enumerate(survey.breaks)),
    )


def _joined(survey: Survey, tail: Sequence[str]) -> tuple[tuple[int, ...], set[int]]:
    """Numbers of calls, where those of the tail in a row are one; and the graphs after which it goes on."""
    calls, continues = list(survey.calls), set[int]()
    before = None  # the graph of a unit that ran last
    for place, unit in enumerate(survey.units):
        if not unit:
            continue
        if before is not None and unit in tail and survey.units[before] in tail:
            calls[place] = calls[before]
            continues.add(before)
        before = place
    return tuple(calls), continues


def _require_one_pass(
    survey: Survey, joined: Sequence[int], tail: Sequence[str], *, in_a_row: bool
) -> None:
    """Refuse a tail that FSDP2 does not gather and reduce once."""
    runs = list(zip(survey.units, survey.calls, joined, strict=True))
    called = sorted({(unit, call) for unit, call, _ in runs if unit in tail})
    if [unit for unit, _ in called] != sorted(tail):
        why = "not all called once each"
    elif in_a_row and len({call for unit, _, call in runs if unit in tail}) > 1:
        why = "called with other units between"
    else:
        return
    raise ModelError(
        f"fsdp: the units of tail={tuple(tail)!r} are {why}, and what FSDP2 holds then is not counted. Name "
        "those that run in a row at the end of the forward, and shard the others by themselves."
    )


class _Counterparts:
    """Which parameter of a unit is that of another one, whose capture it shares."""

    def __init__(self, units: Mapping[str, nn.Module]) -> None:
        self._numbers = {name: [id(each) for each in unit.parameters()] for name, unit in units.items()}
        self._names: dict[int, list[str]] = {}
        for name, numbers in self._numbers.items():
            for number in numbers:
                self._names.setdefault(number, []).append(name)

    def of(self, number: int, unit: str) -> int:
        """The identity of a unit's parameter, for that of the parameter with which its graph was captured."""
        names = self._names.get(number, [])
        if not unit or not names or unit in names:
            return number
        return self._numbers[unit][self._numbers[names[0]].index(number)]


def require_graphs(calls: Iterable[str], captured: Iterable[int], units: Mapping[str, nn.Module]) -> None:
    """Refuse a unit that FSDP2 gathers in a call of which nothing is captured: nothing stands for it.

    ``calls``: the units in the order in which they were called; ``captured``: numbers of calls, from 1.
    """
    numbers = set(captured)
    for number, name in enumerate(calls, 1):
        if number not in numbers and any(True for _ in units[name].parameters()):
            raise CaptureError(
                f"of the unit {name!r} nothing is captured, so that what FSDP2 gathers for it cannot be "
                "counted. Leave it out of the units, and to fully_shard(model), or let Dynamo see its "
                "forward (torch.compiler.disable, for one, hides it)."
            )
