"""The chain program against brute force: every recursive schedule of a tiny chain, action by action."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridremat.graph.segmentation.skip_values import SkipValue
from hybridremat.sequence import states as rows
from hybridremat.sequence.backtrack import Backtracker, InfeasibleSlotError
from hybridremat.sequence.chain_problem import BlockFigures, ChainProblem, OptionFigures, SoloFigures
from hybridremat.sequence.decisions import Backward, Forward, ForwardOption, Solo, block_decisions
from hybridremat.sequence.dynamic_program import ChainTable, chain_table
from support.examples import examples
from support.long_chains import long_chain


@dataclass
class TinyChain:
    """What the oracle sees: boundary values by name, sizes of everything, figures of the options."""

    boundary: list[set[str]]
    size: dict[str, int]
    inner_peak: list[int]
    gradient: list[int]
    blocks: list[BlockFigures]
    released: list[int]
    tangent: int
    readers: dict[str, list[int]]

    def made(self, block: int) -> list[str]:
        """Values that a block makes; an option names those that it leaves alone by their place here."""
        return [n for n in self.size if n in self.boundary[block + 1] - self.boundary[block]]

    def entering(self, block: int) -> list[str]:
        """Values of other blocks that a block reads; an option names those that it touches by place."""
        return [n for n in self.size if block in self.readers[n]]

    def far(self) -> tuple[SkipValue, ...]:
        producer = {n: i for i in range(len(self.blocks)) for n in self.made(i)}
        return tuple(
            SkipValue(number, size, producer[n], tuple(self.readers[n]))
            for number, (n, size) in enumerate(self.size.items())
        )

    def bytes_of(self, names: set[str]) -> int:
        return sum(self.size[name] for name in names)

    def problem(self, *, far: bool = True) -> ChainProblem:
        count = len(self.blocks)
        grown = [b.gradient_bytes for b in self.blocks]
        fresh = [
            [self.bytes_of(self.boundary[j] - self.boundary[s]) for j in range(count + 1)]
            for s in range(count)
        ]
        return ChainProblem(
            blocks=tuple(self.blocks),
            boundary_bytes=tuple(
                tuple(row[j] if j > s else 0 for j in range(count + 1)) for s, row in enumerate(fresh)
            ),
            gradient_bytes=tuple(self.gradient),
            later_gradients=tuple(sum(grown[t + 1 :]) for t in range(count)),
            plain_peak=tuple(
                tuple(self.inner_peak[k] + (fresh[s][k] if k > s else 0) for k in range(count))
                for s in range(count)
            ),
            released_bytes=tuple(sum(self.released[:k]) for k in range(count)),
            tangent_bytes=self.tangent,
            skip_values=self.far() if far else (),
        )


def some_of(count: int) -> st.SearchStrategy[frozenset[int]]:
    return st.frozensets(st.integers(0, count - 1)) if count else st.just(frozenset())


@st.composite
def tiny_chains(draw: st.DrawFn, max_blocks: int = 4) -> TinyChain:
    count = draw(st.integers(1, max_blocks))
    number = st.integers(0, 6)
    boundary: list[set[str]] = [set() for _ in range(count + 1)]
    size = {}
    readers = {}
    for start in range(1, count):
        for which in range(draw(st.integers(1, 2))):
            name = f"v{start}.{which}"
            size[name] = draw(number)
            end = draw(st.integers(start, count - 1))
            readers[name] = [i for i in range(start, end + 1) if i == end or draw(st.booleans())]
            for i in range(start, end + 1):
                boundary[i].add(name)
    blocks = []
    for i in range(count):
        made = [size[name] for name in boundary[i + 1] - boundary[i]]
        entering = sum(i in blocks_ for blocks_ in readers.values())
        options = []
        for _ in range(draw(st.integers(1, 3))):
            saved = sum(made) + draw(number)
            idle, touched = (draw(some_of(n)) for n in (len(made), entering))
            peaks = saved + draw(number), saved + draw(number)
            options.append(OptionFigures(saved, *peaks, draw(number), idle, touched))
        # the program takes what enters a block that runs alone to be needed to the end
        everything = frozenset(range(entering))
        solo = [SoloFigures(draw(number), draw(number), everything) for _ in range(draw(st.integers(0, 2)))]
        blocks.append(BlockFigures(tuple(options), tuple(solo), draw(number), draw(number)))
    inner = [sum(size[n] for n in boundary[i + 1] - boundary[i]) + draw(number) for i in range(count)]
    gradient = [0, *(draw(number) for _ in range(count - 1)), 0]
    released = [draw(st.integers(0, 2)) for _ in range(count)]
    return TinyChain(boundary, size, inner, gradient, blocks, released, draw(number), readers)


# An action: ("F", k), ("Fo", k, o), ("B", k, o), ("S", k, o), ("hold", j) or ("drop", j).
Action = tuple[str | int, ...]


def every_schedule(chain: TinyChain, s: int, t: int) -> list[list[Action]]:
    """All recursive schedules of blocks s…t, as lists of actions."""
    block, last = chain.blocks[s], len(chain.blocks) - 1
    found: list[list[Action]] = []
    tails = every_schedule(chain, s + 1, t) if t > s else [[]]
    for option, tail in product(range(len(block.options)), tails):
        found.append([("Fo", s, option), *tail, ("B", s, option)])
    if s == t and s < last:
        found += [[("S", s, option)] for option in range(len(block.solo))]
    for j in range(s + 1, t + 1):
        run: list[Action] = [("F", k) for k in range(s, j)]
        for later, earlier in product(every_schedule(chain, j, t), every_schedule(chain, s, j - 1)):
            found.append([*run, ("hold", j), *later, ("drop", j), *earlier])
    return found


@dataclass
class Walk:
    """Memory while actions happen one after the other: what is held, as long as somebody reads it later."""

    chain: TinyChain
    actions: list[Action]
    now: int = 0
    held: set[str] = field(default_factory=set)
    own: dict[int, set[str]] = field(default_factory=dict)
    private: dict[int, int] = field(default_factory=dict)
    released: int = 0
    parameter_gradients: int = 0
    gradient: int = 0
    tangent: int = 0
    started: bool = False
    peak: int = 0
    time: int = 0

    def reads(self, action: Action, name: str) -> bool:
        """Whether an action reads a value: forwards all that enters, backwards what their figures say."""
        chain, kind, k = self.chain, action[0], int(action[1])
        if kind in ("F", "Fo"):
            return name in chain.entering(k)
        if kind in ("hold", "drop"):
            return False
        block, number = chain.blocks[k], int(action[2])
        if kind == "B" and name in chain.made(k):
            return chain.made(k).index(name) not in block.options[number].unread
        touched = block.options[number].read if kind == "B" else block.solo[number].read
        return name in chain.entering(k) and chain.entering(k).index(name) in touched

    def wanted(self, names: set[str]) -> set[str]:
        """Those of ``names`` that are read, now or later, before they are made again."""
        return {name for name in names if self.read_again(name)}

    def read_again(self, name: str) -> bool:
        for index in range(self.now, len(self.actions)):
            kind, k = self.actions[index][0], int(self.actions[index][1])
            if self.reads(self.actions[index], name):
                return True
            if index > self.now and kind in ("F", "Fo") and name in self.chain.made(k):
                return False
        return False

    def base(self) -> int:
        kept = self.chain.bytes_of(self.wanted(self.held)) + sum(self.private.values())
        return kept + self.released + self.parameter_gradients + self.tangent

    def keep(self, key: int, names: set[str]) -> None:
        self.own[key] = names - self.held
        self.held |= names

    def act(self, action: Action) -> None:
        kind, k = action[0], int(action[1])
        chain = self.chain
        entering = chain.bytes_of(self.wanted(chain.boundary[k] - self.held))
        if kind == "hold":
            self.keep(-k, chain.boundary[k])
        elif kind == "drop":
            self.held -= self.own.pop(-k)
        elif kind in ("F", "Fo"):
            self.forward(action, entering)
        else:
            self.backward(action)

    def forward(self, action: Action, entering: int) -> None:
        chain, k = self.chain, int(action[1])
        block = chain.blocks[k]
        self.time += block.forward_time
        if action[0] == "F":
            self.peak = max(self.peak, self.base() + self.gradient + entering + chain.inner_peak[k])
        else:
            option = block.options[int(action[2])]
            self.peak = max(self.peak, self.base() + self.gradient + option.forward_peak)
            outputs = chain.boundary[k + 1] - chain.boundary[k]
            self.private[k] = option.saved - chain.bytes_of(outputs)
            self.keep(k, outputs)
            self.time += option.time
        if not self.started:
            self.released += chain.released[k]

    def backward(self, action: Action) -> None:
        chain, k, number = self.chain, int(action[1]), int(action[2])
        block = chain.blocks[k]
        self.started, self.released, self.tangent = True, 0, chain.tangent
        if action[0] == "B":
            self.held -= self.own.pop(k)
            self.private.pop(k)
        figures = block.options[number] if action[0] == "B" else block.solo[number]
        self.peak = max(self.peak, self.base() + figures.backward_peak)
        self.time += figures.time if action[0] == "S" else 0
        self.parameter_gradients += block.gradient_bytes
        self.gradient = chain.gradient[k]


def walk(chain: TinyChain, actions: list[Action]) -> tuple[int, int]:
    """Peak and time of one schedule."""
    state = Walk(chain, actions)
    for state.now, action in enumerate(actions):
        state.act(action)
    assert not state.held and not state.private
    return state.peak, state.time


def decided(actions: list[Action]) -> tuple[object, ...]:
    make = {"F": Forward, "Fo": ForwardOption, "B": Backward, "S": Solo}
    return tuple(make[str(a[0])](*a[1:]) for a in actions if a[0] in make)  # type: ignore[arg-type]


def fine_table(problem: ChainProblem, memory: int) -> ChainTable:
    table = chain_table(problem, memory=memory, slots=memory)
    assert table.unit == 1
    return table


@examples(150)
@given(tiny_chains())
def test_every_entry_is_the_least_time_over_all_schedules(chain: TinyChain) -> None:
    figures = [walk(chain, actions) for actions in every_schedule(chain, 0, len(chain.blocks) - 1)]
    table = fine_table(chain.problem(), max(peak for peak, _ in figures) + 1)
    for slot, found in enumerate(table.top):
        least = min((time for peak, time in figures if peak <= slot), default=float("inf"))
        assert found == least, f"{slot} bytes"


@examples(80)
@given(tiny_chains())
def test_with_one_option_a_block_the_schedule_is_rotors_optimum(chain: TinyChain) -> None:
    """All that the backward reads is saved, or only the input: of all persistent schedules the fastest."""
    fastest = [min(block.options, key=lambda each: each.time) for block in chain.blocks]
    blocks = [replace(b, options=(o,), solo=()) for b, o in zip(chain.blocks, fastest, strict=True)]
    chain = replace(chain, blocks=blocks)
    figures = [walk(chain, actions) for actions in every_schedule(chain, 0, len(blocks) - 1)]
    table = fine_table(chain.problem(), max(peak for peak, _ in figures) + 1)
    for slot, found in enumerate(table.top):
        assert found == min((time for peak, time in figures if peak <= slot), default=float("inf"))


@examples(80)
@given(tiny_chains())
def test_rebuilt_decisions_cost_what_the_table_says(chain: TinyChain) -> None:
    best: dict[tuple[object, ...], tuple[int, int]] = {}
    for actions in every_schedule(chain, 0, len(chain.blocks) - 1):
        key = decided(actions)
        best[key] = min(best.get(key, (10**9, 0)), walk(chain, actions))
    table = fine_table(chain.problem(), max(peak for peak, _ in best.values()) + 1)
    rebuild = Backtracker(table)
    for slot in table.breakpoints():
        decisions = rebuild(slot)
        peak, time = best[decisions]
        assert time == table.top[slot]
        assert peak <= slot
        assert [d.block for d in block_decisions(decisions)] == list(range(len(chain.blocks)))


@examples(60)
@given(tiny_chains(max_blocks=3), st.integers(2, 12))
def test_coarse_slots_never_promise_too_little_memory(chain: TinyChain, slots: int) -> None:
    figures = [walk(chain, actions) for actions in every_schedule(chain, 0, len(chain.blocks) - 1)]
    table = chain_table(chain.problem(), memory=max(peak for peak, _ in figures) + 1, slots=slots)
    for slot in table.breakpoints():
        reached = [time for peak, time in figures if peak <= table.peak_bytes(slot)]
        assert reached and min(reached) <= table.top[slot]
    assert min(time for _, time in figures) == table.top[-1]


@examples(40)
@given(tiny_chains(max_blocks=2), st.integers(3, 8), st.booleans())
def test_equal_sub_chains_share_rows_and_change_nothing(chain: TinyChain, count: int, wide: bool) -> None:
    pattern = chain.blocks[0]
    width = 2 if wide else 1
    problem = ChainProblem(
        blocks=(pattern,) * count,
        boundary_bytes=tuple(tuple(width if j > s else 0 for j in range(count + 1)) for s in range(count)),
        gradient_bytes=(0, *(1,) * (count - 1), 0),
        later_gradients=tuple(pattern.gradient_bytes * (count - 1 - t) for t in range(count)),
        plain_peak=tuple(tuple(3 + (width if k > s else 0) for k in range(count)) for s in range(count)),
        tangent_bytes=1,
    )
    shared = chain_table(problem, memory=60, slots=17)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "_row_keys", lambda p, _: np.arange(len(p) ** 2).reshape(len(p), len(p)))
        apart = chain_table(problem, memory=60, slots=17)
    assert len(shared.rows) <= 3 * count < len(apart.rows) + 3 * count
    for s in range(count):
        for t in range(s, count):
            assert (shared.row(s, t) == apart.row(s, t)).all()


def test_a_chain_longer_than_half_the_stack_is_rebuilt() -> None:
    table = chain_table(long_chain(300), memory=3100, slots=400)
    decisions = Backtracker(table)(table.breakpoints()[0])
    assert len(block_decisions(decisions)) == 300
    assert max(d.forward_runs for d in block_decisions(decisions)) > 1


def test_nothing_fits_in_no_memory() -> None:
    table = chain_table(long_chain(3), memory=40)
    with pytest.raises(InfeasibleSlotError, match="no schedule of this chain fits in 0 bytes"):
        Backtracker(table)(0)
