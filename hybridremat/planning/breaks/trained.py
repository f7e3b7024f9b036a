"""Which parameters a surveyed step makes gradients of, and in which call of which unit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from hybridremat.errors import CaptureError
from hybridremat.graph.tracing.trace import gradients_at, trained_inputs
from hybridremat.planning.breaks.sharding import Trained
from hybridremat.planning.breaks.survey import Survey


def trained_in(survey: Survey, units: Mapping[str, nn.Module]) -> Trained:
    """What the path that a survey took last makes gradients of."""
    counterparts = _Counterparts(units)
    gradients, late = dict.fromkeys(survey.order, 0), set[str]()
    first: dict[int, int] = {}  # the call in which a parameter is used first
    for graph, unit, call in zip(survey.ran, survey.units, survey.calls, strict=True):
        step = survey.traced[graph.key]
        places = trained_inputs(step)
        for place in places & graph.parameters.keys():
            first.setdefault(counterparts.of(graph.parameters[place], unit), call)
        made = gradients_at(step, graph.parameters)
        gradients[graph.key] = sum(step.graph.values[value].bytes for value in made)
        if places <= graph.parameters.keys():
            late.add(graph.key)
    ends = set(first.values())
    return Trained(
        frozenset(survey.leaves | first.keys()),
        gradients,
        frozenset(late),
        tuple(survey.calls),
        tuple(call in ends for call in survey.calls),
        tuple(ending is not None for ending in survey.breaks),
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
