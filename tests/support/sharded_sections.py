"""What FSDP2 takes in each of its hooks, measured and as it is counted; see processes.py.

Measured are the bytes that the profiler reports inside of FSDP2's own ranges of time, counted are the
sections of a plan's composition. Nets have more in their weights than in what they compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

import hybridremat
from hybridremat.plans.records import StepComposition
from support.sharded_cases import Case

WIDTHS = (40, 150, 70, 210, 25)
KINDS = {"pre_forward": "gather", "pre_backward": "again", "post_backward_reduce": "reduce"}


class Wide(nn.Module):
    """Two layers whose hidden width is its own, with a part that nobody uses and a break, if asked for."""

    def __init__(self, hidden: int, *, broken: bool = False, unused: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(31, hidden), nn.Linear(hidden, 31)
        self.norm, self.broken = nn.LayerNorm(31), broken
        self.unused = nn.Linear(31, unused) if unused else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.gelu(self.up(self.norm(x)))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.down(y)


class Uneven(nn.Module):
    """Such layers after an embedding, called in an order of their numbers."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2, 3, 4), **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(57, 31), nn.Linear(31, 57)
        self.layers, self.order = nn.ModuleList(Wide(width, **options) for width in WIDTHS), order

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.order:
            x = self.layers[number](x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Embedded(Uneven):
    """One whose embedding is in its first layer, which has no gradients to hand on."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(0, nn.Embedding(57, 31))
        self.layers.insert(1, nn.Embedding(99, 31))
        self.order = tuple(range(2, 7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](tokens) + self.layers[1](tokens)
        for number in self.order:
            x = self.layers[number](x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Scaled(nn.Module):
    """A layer without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.5 * torch.tanh(x)


def without_parameters() -> nn.Module:
    """One with layers between the others of which there is nothing to gather, one of them without any op."""
    model = Uneven(tuple(range(8)))
    for place, layer in ((1, Scaled()), (3, Scaled()), (6, nn.Identity())):
        model.layers.insert(place, layer)
    return model


def frozen() -> nn.Module:
    model = Uneven()
    model.layers[1].requires_grad_(requires_grad=False)
    model.layers[3].up.requires_grad_(requires_grad=False)
    return model


def tokens(rank: int, step: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(57, (2, 5), generator=torch.Generator().manual_seed(10 * rank + step))}


def case(make: Callable[[], nn.Module], **options: Any) -> Case:
    return Case(make, tokens, options=tuple(options.items()), limits=("100%",))


HALF, WHOLE = torch.bfloat16, torch.float32
KEPT = {"reshard_after_forward": False}
TAIL = ("layers.4", "head")
EXACT = {
    "uneven": case(Uneven),
    "frozen": case(frozen),
    "unused": case(lambda: Uneven(unused=90)),
    "embedded": case(Embedded),
    "kept": case(Uneven, **KEPT),
    "embedded, kept": case(Embedded, **KEPT),
    "tail": Case(Uneven, tokens, ("layers.*", "head"), (("tail", TAIL),), ("100%",)),
    "bfloat16": case(Uneven, param_dtype=HALF, reduce_dtype=WHOLE),
    "all in bfloat16": case(Uneven, param_dtype=HALF),
    "reduced in bfloat16": case(Uneven, reduce_dtype=HALF),
}
TURNS = (0, 1, 2, 3, 4, 3, 1, 0, 2)


class Tower(Uneven):
    """One whose first two layers run without gradients."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number > 1):
                x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1).float(), tokens.flatten())


class Disabled(Uneven):
    """One of whose layers nothing is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].forward = torch.compiler.disable(self.layers[3].forward)


COUNTED = {
    "without parameters": case(without_parameters),
    "tower": case(Tower),
    "broken": case(lambda: Uneven(broken=True)),
    "broken, kept": case(lambda: Uneven(broken=True), **KEPT),
    "in turns": case(lambda: Uneven(TURNS)),
    "in turns, kept": case(lambda: Uneven(TURNS), **KEPT),
    "in a row": case(lambda: Uneven((0, 1, 1, 3, 3, 3, 2, 4))),
    "in a row, kept": case(lambda: Uneven((0, 1, 1, 3, 3, 3, 2, 4)), **KEPT),
    "broken in a row": case(lambda: Uneven((1, 1, 3, 3, 2), broken=True)),
}
"""Where more is counted than there is: outputs inside and between units, gradients that are added up."""
EVERY = {**EXACT, **COUNTED}


FEW = ("without parameters", "embedded", "in turns, kept")
"""Those that every run of the tests measures."""
OTHERS = tuple(name for name in EVERY if name not in FEW)


def few(_: int) -> dict[str, Any]:
    """A few nets, and what is said of a unit of which nothing is captured."""
    hidden = case(Disabled)
    try:
        hidden.planned("100%", alone=True)
    except hybridremat.CaptureError as error:
        said = str(error)
    else:
        said = "it was planned"
    return {**_sections({name: EVERY[name] for name in FEW}), "hidden": said}


def rest(_: int) -> dict[str, Any]:
    """All other nets."""
    return _sections({name: EVERY[name] for name in OTHERS})


def _sections(cases: dict[str, Case]) -> dict[str, Any]:
    """For each net, what its hooks took in three steps, what was counted for them, and peaks."""
    found = {}
    for name, each in cases.items():
        torch.manual_seed(0)
        model = each.planned("100%", alone=distributed.get_backend() == "fake")
        plan = hybridremat.get_plan(model)
        each.sharded(model)
        took, peaks = [], []
        for step in range(3):
            hooks, peak = measured(model, each.batch(0, step))
            took.append({" ".join(key): value for key, value in hooks.items()})
            peaks.append(peak)
            model.zero_grad()
        units = [unit for unit, _ in model.named_modules() if unit.count(".") == 1]
        tail = plan.request.fsdp.tail
        most = predicted(plan.composition, units, tail)
        counted = {" ".join(key): value for key, value in most.items()}
        found[name] = {"took": took, "counted": counted, "peaks": peaks, "limit": plan.memory_limit}
    return found


def measured(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[dict[tuple[str, str], int], int]:
    """Most bytes above the beginning of a step in each hook of each unit, and in the whole step."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=cpu) as seen:
        model(**batch).backward()
    events = list(seen.profiler.kineto_results.events())
    sizes = sorted((each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]")
    ranges = [
        (each.start_ns(), each.start_ns() + each.duration_ns(), *_hook(each.name()))
        for each in events
        if each.name().startswith("FSDP::")
    ]
    level, most, highest = 0, defaultdict[tuple[str, str], int](int), 0
    levels = []
    for when, size in sizes:
        level += size
        levels.append((when, level))
        highest = max(highest, level)
    for start, end, kind, unit in ranges:
        inside = [each for when, each in levels if start <= when <= end]
        if kind and inside:
            most[kind, unit] = max(most[kind, unit], *inside)
    return dict(most), highest


def _hook(name: str) -> tuple[str, str]:
    """The kind of a range of time, and its unit: ``FSDP::pre_forward (layers.0)``."""
    kind, _, unit = name.removeprefix("FSDP::").partition(" (")
    return KINDS.get(kind, ""), ", ".join(sorted(unit.rstrip(")").split(", ")))


def predicted(
    composition: StepComposition | None, units: list[str], tail: tuple[str, ...]
) -> dict[tuple[str, str], int]:
    """Most bytes that were counted for each hook of each of the units, which are in the model's order.

    Hooks of a ``tail`` have the names of all its units.
    """
    assert composition is not None
    most = defaultdict[tuple[str, str], int](int)
    late = list[int]()
    for key, level in _levels(composition):
        if key[0] == "late":
            late.insert(0, level)
        else:
            named = (key[0], ", ".join(sorted(tail))) if key[1] in tail else key
            most[named] = max(most[named], level)
    for unit, level in zip(units, late, strict=False):  # in these nets the late ones come first
        most["reduce", unit] = level
    return dict(most)


def _levels(composition: StepComposition) -> Iterator[tuple[tuple[str, str], int]]:
    """The hooks of FSDP2 in a step as it was counted: its sections stand around those of each unit."""
    sections = composition.sections
    first = next(n for n, each in enumerate(sections) if each.part is not None or each.beside_forward)
    root = first - 2 if sections[first].unit else first - 1
    before = kept = 0
    later = sum(each.left for each in sections)
    for place, section in enumerate(sections):
        later -= section.left
        forward, backward = before + section.forward_peak, kept + section.backward_peak + later
        before, kept = before + section.saved, kept + section.saved - section.dropped
        follows = sections[place + 1].unit if place + 1 < len(sections) else ""
        if place < root:
            yield ("late", ""), backward
        elif place == root:
            yield ("gather", ""), forward
            yield ("reduce", ""), backward
        elif section.part is not None or section.beside_forward:
            continue
        elif follows and (section.forward_peak or not sections[place - 1].unit):
            yield ("gather", follows), forward
            yield ("reduce", follows), backward
        else:
            yield ("again", sections[place - 1].unit), backward
