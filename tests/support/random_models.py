"""Models that hypothesis puts together from :mod:`support.random_pieces`.

A recipe is a list of steps. Each takes a tensor that is alive (or two of one shape), and puts its result
beside it, or in its place. Shapes are found by running the pieces once. What is alive at the end is part
of the loss, and some of it an output too.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st
from torch import nn

from support.random_pieces import PIECES, UnfitError

MOST_ELEMENTS = 1 << 13
SHARED = "shared"  # a piece used before


@dataclass(frozen=True)
class Step:
    """Which piece, which of its variants, on which live tensors, and whether in their place."""

    kind: str
    variant: int
    first: int
    second: int
    beside: bool


@dataclass(frozen=True)
class Recipe:
    """A model: what it takes, its steps, how many tensors it returns beside the loss."""

    steps: tuple[Step, ...]
    start: str
    outputs: int
    seed: int


def _steps():
    number = st.integers(0, 23)
    return st.builds(
        Step, st.sampled_from([*PIECES, SHARED]), number, st.integers(0, 3), st.integers(0, 3), st.booleans()
    )


def recipes(longest: int = 14):
    """A strategy of recipes."""
    return st.builds(
        Recipe,
        st.lists(_steps(), min_size=3, max_size=longest).map(tuple),
        st.sampled_from(["tokens", "sequence", "image"]),
        st.integers(0, 2),
        st.integers(0, 1000),
    )


def drawn_recipe(seed: int, longest: int) -> Recipe:
    """One recipe for each seed, for tests that take too long to have hypothesis look for a smaller one."""
    draw = Random(seed)

    def step() -> Step:
        numbers = draw.randrange(24), draw.randrange(4), draw.randrange(4)
        return Step(draw.choice([*PIECES, SHARED]), *numbers, draw.random() < 0.5)

    steps = tuple(step() for _ in range(longest))
    return Recipe(steps, draw.choice(["tokens", "sequence", "image"]), draw.randrange(3), seed)


class RandomModel(nn.Module):
    """Runs the steps of a recipe; those that do not fit are left out."""

    def __init__(self, recipe: Recipe, times: int = 1) -> None:
        super().__init__()
        self.most_elements = MOST_ELEMENTS * times
        self.table = nn.Embedding(20, 16) if recipe.start == "tokens" else None
        self.entry = nn.Linear(16, 16) if recipe.start == "sequence" else None
        self.stem = nn.Conv2d(3, 8, 3, padding=1) if recipe.start == "image" else None
        self.pieces = nn.ModuleList()
        self.wiring: list[tuple[int, tuple[int, ...], bool]] = []
        self.outputs = recipe.outputs
        live = [self.begin(**inputs_of(recipe, times))]
        with torch.no_grad():
            for step in recipe.steps:
                self._add(step, live)

    def begin(self, x):
        layer = self.table or self.entry or self.stem
        return layer(x)

    def _add(self, step: Step, live: list[torch.Tensor]) -> None:
        first = step.first % len(live)
        same = [i for i, other in enumerate(live) if other.shape == live[first].shape]
        taken = (first, same[step.second % len(same)]) if step.kind == "join" else (first,)
        try:
            if step.kind == SHARED:
                index = step.variant % max(1, len(self.pieces))
                made = self.pieces[index](*[live[i] * 1.0 for i in taken])
            else:
                index, piece = len(self.pieces), PIECES[step.kind](tuple(live[first].shape), step.variant)
                made = piece(*[live[i] * 1.0 for i in taken])
                self.pieces.append(piece)
        except (UnfitError, RuntimeError, TypeError, IndexError, ValueError):
            return  # it does not fit here
        results = list(made) if isinstance(made, (list, tuple)) else [made]
        if any(r.numel() > self.most_elements or not 2 <= r.dim() <= 4 or 0 in r.shape for r in results):
            if index == len(self.pieces) - 1 and step.kind != SHARED:
                del self.pieces[index]
            return
        self.wiring.append((index, taken, step.beside))
        self._place(live, results, taken, step.beside)

    @staticmethod
    def _place(live, results, taken, beside):
        if beside and len(live) < 4:
            live.extend(results)
        else:
            live[taken[0]] = results[0]
            live.extend(results[1:])

    def forward(self, x):
        live = [self.begin(x)]
        for index, taken, beside in self.wiring:
            made = self.pieces[index](*[live[i] for i in taken])
            self._place(live, list(made) if isinstance(made, (list, tuple)) else [made], taken, beside)
        loss = sum(tensor.float().pow(2).mean() for tensor in live)
        return loss, *live[len(live) - self.outputs :][:2]


def inputs_of(recipe: Recipe, times: int = 1) -> dict[str, torch.Tensor]:
    """The batch of a recipe, with so many times the usual rows."""
    shapes = {"tokens": (3, 12), "sequence": (3, 12, 16), "image": (2, 3, 8, 8)}
    rows, *rest = shapes[recipe.start]
    shape = (times * rows, *rest)
    return {"x": torch.randint(0, 20, shape) if recipe.start == "tokens" else torch.randn(shape)}


def build(recipe: Recipe, times: int = 1) -> tuple[RandomModel, dict[str, torch.Tensor]]:
    """The model and its batch, the same in every call. With more rows, activations outweigh parameters."""
    torch.manual_seed(recipe.seed)
    model = RandomModel(recipe, times)
    return model.train(), inputs_of(recipe, times)
