"""Explanations of one block or one module of a plan: :meth:`Plan.inspect`, :meth:`Plan.explain`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hybridremat.errors import InputError
from hybridremat.plans.patterns import ancestors
from hybridremat.plans.plan_data import PlanData
from hybridremat.plans.records import PlannedBlock, ValueRecord
from hybridremat.reports.block_rows import module_names
from hybridremat.reports.explanation import (
    BlockExplanation,
    ModuleExplanation,
    OptionExplanation,
    Treatment,
    ValueExplanation,
)
from hybridremat.reports.what_if import Headroom, WhatIf


def explain_block(plan: PlanData, index: int) -> BlockExplanation:
    """Explain one block.

    Raises
    ------
    InputError
        If there is no such block.
    """
    if not 0 <= index < len(plan.blocks):
        raise InputError(f"there is no block {index}; this plan has blocks 0 to {len(plan.blocks) - 1}")
    part, place = _part_of(plan, index)
    what_if = None if part.details is None else WhatIf(part, part.details)
    block = plan.blocks[index]
    options = () if what_if is None else tuple(_options(what_if, place))
    known, moves = options or block.option is None, bool(part.schedule.moves)
    return BlockExplanation(
        block=block,
        modules=module_names(plan.blocks)[index],
        values=tuple(_values(block, what_if)),
        headroom=None if what_if is None else what_if.headroom(place),
        options=options,
        reason=_reason(options, block, moves=moves) if known else "its options are not known",
        compiled=plan.compiler != "eager",
    )


def explain_module(plan: PlanData, module: str) -> ModuleExplanation:
    """Explain what the plan does with the values of a module, given by its path.

    Raises
    ------
    InputError
        If no value of the plan is made there.
    """
    values: list[ValueExplanation] = []
    headroom: dict[int, Headroom] = {}
    for block in plan.blocks:
        if not any(_within(record.module, module) for record in _records(block)):
            continue
        part, place = _part_of(plan, block.index)
        what_if = None if part.details is None else WhatIf(part, part.details)
        values += (each for each in _values(block, what_if, module) if _within(each.value.module, module))
        if what_if is not None:
            headroom[block.index] = what_if.headroom(place)
    if not values:
        raise InputError(_no_module(plan, module))
    return ModuleExplanation(module, tuple(values), headroom, plan.compiler != "eager")


def _part_of(plan: PlanData, index: int) -> tuple[PlanData, int]:
    """The plan of the graph that a block belongs to (a step may have several), and the index there."""
    if not plan.parts:
        return plan, index
    wanted = plan.blocks[index]
    for part in plan.parts:
        for place, block in enumerate(part.blocks):
            if replace(block, index=index) == wanted:
                return part, place
    return plan, index


def _records(block: PlannedBlock) -> Iterator[ValueRecord]:
    yield from block.saved
    yield from (record for record, _ in block.recomputed)
    yield from block.freed
    yield from block.moved


def _values(block: PlannedBlock, what_if: WhatIf | None, module: str = "") -> Iterator[ValueExplanation]:
    again = {record for record, _ in block.recomputed}

    def explained(record: ValueRecord, policy: Treatment, times: int = 0) -> ValueExplanation:
        if what_if is None:
            return ValueExplanation(record, block.index, policy, times)
        asked = _within(record.module, module)
        saved = what_if.saving(record.id) if asked and times > 0 else None
        moves = asked and policy == "MOVE"
        return ValueExplanation(
            record,
            block.index,
            policy,
            times,
            what_if.staying(record.id) if moves else saved,
            what_if.again(record.id) if moves else None,
            what_if.in_place(record.id),
            what_if.parts(record.id),
        )

    yield from (explained(record, "SAVE") for record in block.saved if record not in again)
    yield from (explained(record, "MOVE") for record in block.moved if record not in again)
    yield from (explained(record, "RECOMPUTE", times) for record, times in block.recomputed)
    yield from (explained(record, "FREE") for record in block.freed)


def _options(what_if: WhatIf, block: int) -> Iterator[OptionExplanation]:
    for number, option, change in what_if.options(block):
        yield OptionExplanation(
            number, option.saved_bytes, option.forward_peak, option.backward_peak, option.time, change
        )


def _reason(options: Iterable[OptionExplanation], block: PlannedBlock, *, moves: bool) -> str:
    changes = [option.change for option in options if option.change is not None]
    if block.option is None and moves:
        return "nothing is computed again: what does not fit waits elsewhere, and is back in time"
    if block.option is None:
        return "the step runs plain: all of it fits"
    if not changes:
        return "the block has no other option of this kind"
    over = sum(not change.fits for change in changes)
    slower = sum(change.fits and change.more_time > 0 for change in changes)
    equal = sum(change.fits and change.more_time == 0 for change in changes)
    faster = len(changes) - over - slower - equal
    parts = [
        f"{over} would pass the limit" if over else "",
        f"{slower} would take more time" if slower else "",
        f"{equal} would take the same time" if equal else "",
        f"{faster} would fit and be faster (the chain program counts memory in slots, rounded up)"
        if faster
        else "",
    ]
    return f"of its {len(changes)} other options, all else as it is, {', '.join(filter(None, parts))}"


def _within(module: str, above: str) -> bool:
    """Whether a module is ``above`` or below it; every module is below the empty path."""
    return not above or module == above or module.startswith(f"{above}.")


def _no_module(plan: PlanData, module: str) -> str:
    paths = {record.module for block in plan.blocks for record in _records(block) if record.module}
    known = sorted({above for path in paths for above in ancestors(path)})
    near = difflib.get_close_matches(module, known, n=3) or known[:5]
    return f"no value of this plan is made in {module!r}; there are, for example, {', '.join(near)}"
