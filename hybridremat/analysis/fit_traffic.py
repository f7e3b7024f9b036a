"""What collectives send in one step: rings, in which each rank passes on all but its own part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridremat.graph.tracing.fx_nodes import is_collective, tensors
from hybridremat.graph.tracing.trace import TracedStep
from hybridremat.planning.breaks.sharding import Sharding
from hybridremat.planning.breaks.survey import Survey


def sent_by_fsdp(survey: Survey, ranks: int) -> int:
    """Bytes that each rank sends in a step of FSDP2, and receives; 0 where nothing is sharded.

    A unit is gathered for each forward and backward of it that does not find it gathered, and reduces once;
    so does the rest of the model.
    """
    sharding = survey.sharding
    if sharding is None:
        return 0
    calls = _calls(survey)
    gathered = _gathers(calls, sharding)
    moved = sum(sharding.units[name].buffer for name in gathered) + sharding.rest.buffer
    ran = {name for name, _ in calls}
    moved += sum(sharding.units[name].reduced for name in ran) + sharding.rest.reduced
    return moved * (ranks - 1) // ranks


def sent_in_graphs(steps: Iterable[TracedStep], ranks: int) -> int:
    """Bytes that each rank sends in captured graphs, and receives; an all-reduce goes round twice."""
    moved = 0
    for node in (each for step in steps for each in step.op_nodes if is_collective(each)):
        made = sum(each.nbytes for each in tensors(node.meta.get("val")))
        given = sum(each.nbytes for n in node.all_input_nodes for each in tensors(n.meta.get("val")))
        name = str(node.target)
        if "all_reduce" in name:
            moved += 2 * given
        elif "wait_tensor" not in name:
            moved += max(made, given)
    return moved * (ranks - 1) // ranks


def _calls(survey: Survey) -> list[tuple[str, bool]]:
    """The unit of each call in the order of the forward, and whether its backward hands on gradients."""
    assert survey.sharding is not None
    heads, trained = survey.sharding.heads, survey.sharding.trained
    found = dict[int, tuple[str, bool]]()
    for name, call, late in zip(survey.units, trained.calls, trained.late, strict=True):
        if call:
            found.setdefault(call, (heads[name], not late))
    return list(found.values())


def _gathers(calls: Sequence[tuple[str, bool]], sharding: Sharding) -> list[str]:
    """The units that are gathered in a step, in order, those of the rest apart."""
    found: list[str] = []
    there: set[str] = set()

    def gather(name: str) -> None:
        if name not in there:
            found.append(name)
            there.add(name)

    for name, _ in calls:
        gather(name)
        if name not in sharding.kept:
            there.discard(name)
    for name, hands_on in reversed(calls):
        gather(name)
        if hands_on:
            there.discard(name)
    return found
