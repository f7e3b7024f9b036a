"""Damaged plan files: bytes flipped, text cut off, parts of the data replaced, under checksums that fit.

:meth:`Corpus.damaged` makes one from a seed; :func:`used` reads and shows it, :func:`applied` trains with it.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import hybridremat
from hybridremat.errors import HybridRematError, PlanFormatError
from hybridremat.plans.codec import checksum
from hybridremat.reports.text import plan_tables, render
from hybridremat.sequence.offload.link import Link
from support.older_plans import made, read
from support.sized_steps import tokens
from support.training import Transformer, train

KINDS: dict[str, dict[str, Any]] = {
    "plain": {"memory_limit": "95%", "reserve": 64},
    "pins": {"memory_limit": "100%", "policy": {"second.1": "must_recompute"}},
    "early": {"memory_limit": "90%", "gradients": "in_backward"},
    "breaks": {"memory_limit": "120%", "graph_breaks": "plan"},
    "units": {"memory_limit": "120%", "units": ("first", "second")},
    "sizes": {"memory_limit": "95%", "dynamic": True},
    "moves": {"memory_limit": "65%"},
    "compiled": {"memory_limit": "100%", "compiler": "inductor"},
    "certified": {"memory_limit": "95%", "certify": True},
}
"""Plans that are made now, by name; what is asked for each."""

OLDER = ("4-plain", "5-pins", "6-breaks", "6-last-early")

SCALARS = (
    None, True, False, 0, 1, -1, 7, 2**31, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, -(10**30), 10**400,
    0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf"),
    "", "x", "a" * 10_000, "\x1b[2J\x07", "\n" * 50, "\ud800", "\u202e", "[link=x]", "{{ 1 }}", "<script>",
    "%s%n", "100%", "9" * 30 + "TB", "1e999", "NaN", "../../x", "__class__", "../../../etc/passwd",
)  # fmt: skip


def corpus(folder: Path, kinds: Sequence[str] = tuple(KINDS), older: Sequence[str] = OLDER) -> dict[str, Any]:
    """The data of files of several kinds, by name."""
    how = {"cost_model": "flops", "progress": False, "cache": False}
    data = {name: read(name) for name in older}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hybridremat.planning.moving.NOMINAL", Link(1e15, 1e15, latency=0))  # so that it moves
        for name in kinds:
            model, batch = (Transformer(1, 16), tokens(4, 40)) if name == "moves" else made(name)
            asked = KINDS[name] | ({"offload": f"file:{folder}"} if name == "moves" else {})
            plan = hybridremat.plan(model, kwargs=batch, **how, **asked)
            data[name] = json.loads(json.dumps(plan.to_dict()))
    return data


def places(data: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to everything in JSON data."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(found for key, each in inner for found in places(each, (*path, key)))]


@dataclass(frozen=True)
class Corpus:
    """Files to damage: their data, and all places in it."""

    files: dict[str, Any]
    places: dict[str, list[tuple[Any, ...]]]

    @classmethod
    def of(cls, files: dict[str, Any]) -> Corpus:
        """Of some files."""
        return cls(files, {name: places(data)[1:] for name, data in files.items()})

    def damaged(self, seed: int) -> tuple[str, bytes]:
        """A damaged file, and what was done to which."""
        drawn = random.Random(seed)
        name = drawn.choice(sorted(self.files))
        if drawn.random() < 0.2:
            text = json.dumps(self.files[name]).encode()
            return f"{name}: bytes", _bytes_damaged(text, drawn)
        data = copy.deepcopy(self.files[name])
        done = [self._change(name, data, drawn) for _ in range(drawn.choice((1, 1, 1, 2, 4)))]
        data["checksum"] = checksum(data)
        return f"{name}: {'; '.join(done)}", json.dumps(data).encode()

    def _change(self, name: str, data: Any, drawn: random.Random) -> str:
        path = self._place(name, drawn)
        try:
            holder = data
            for key in path[:-1]:
                holder = holder[key]
            how = drawn.choice(sorted(CHANGES))
            CHANGES[how](holder, path[-1], drawn)
        except (LookupError, TypeError, AttributeError):  # gone by an earlier change
            return "nothing"
        return f"{how} at {'.'.join(map(str, path))}"

    def _place(self, name: str, drawn: random.Random) -> tuple[Any, ...]:
        """A place, those of a few rows' cells as likely as those that there is one of."""
        every = self.places[name]
        path = drawn.choice(every)
        if drawn.random() < 0.5:
            wanted = drawn.choice(sorted({each[0] for each in every}))
            path = drawn.choice([each for each in every if each[0] == wanted])
        return path


def _replaced(holder: Any, key: Any, drawn: random.Random) -> None:
    holder[key] = drawn.choice((*SCALARS, [], {}, [[]], {"x": 1}))


def _nudged(holder: Any, key: Any, drawn: random.Random) -> None:
    item = holder[key]
    if isinstance(item, (int, float)):
        holder[key] = drawn.choice((item + 1, item - 1, -item, item * 2, item * 10**9, item + 2**32))
    elif isinstance(item, str):
        holder[key] = drawn.choice((item[1:], item * 2, item.upper(), item + "\x00"))
    elif isinstance(item, list):
        drawn.shuffle(item)


def _dropped(holder: Any, key: Any, drawn: random.Random) -> None:
    del holder[key]


def _added(holder: Any, key: Any, drawn: random.Random) -> None:
    if isinstance(holder, dict):
        holder[drawn.choice(("extra", "others", "__class__", key + "x"))] = drawn.choice((1, holder[key]))
    else:
        holder.insert(key, drawn.choice((0, copy.deepcopy(holder[key]))))


def _repeated(holder: Any, key: Any, drawn: random.Random) -> None:
    if isinstance(holder, list):
        holder[key : key + 1] = [holder[key]] * drawn.choice((2, 50, 2000))
    elif isinstance(holder[key], list):
        holder[key] = holder[key] * drawn.choice((2, 50))


def _nested(holder: Any, key: Any, drawn: random.Random) -> None:
    item = holder[key]
    for _ in range(drawn.choice((1, 30, 200))):
        item = [item] if drawn.random() < 0.8 else {"x": item}
    holder[key] = item


def _exchanged(holder: Any, key: Any, drawn: random.Random) -> None:
    other = drawn.choice([*(holder if isinstance(holder, dict) else range(len(holder)))])
    holder[key], holder[other] = copy.deepcopy(holder[other]), holder[key]


CHANGES: dict[str, Callable[[Any, Any, random.Random], None]] = {
    "replaced": _replaced,
    "nudged": _nudged,
    "dropped": _dropped,
    "added": _added,
    "repeated": _repeated,
    "nested": _nested,
    "exchanged": _exchanged,
}


def _bytes_damaged(text: bytes, drawn: random.Random) -> bytes:
    changed, how = bytearray(text), drawn.randrange(5)
    place = drawn.randrange(len(text))
    if how == 0:
        return text[:place]
    if how == 1:
        for _ in range(drawn.choice((1, 3, 100))):
            changed[drawn.randrange(len(changed))] ^= 1 << drawn.randrange(8)
    elif how == 2:
        del changed[place : place + drawn.choice((1, 10, 1000))]
    elif how == 3:
        changed[place:place] = drawn.choice((b"\x00", b"[" * 10**5, b"9" * 10**5, b"\xff", b'{"a":' * 10**5))
    else:
        return drawn.choice((b"", b"null", b"[]", b"{}", b"[" * 10**6, b'{"schema": 8}', b"\x1f\x8b"))
    return bytes(changed)


def used(path: Path, *, fully: bool = False) -> str:
    """Read a file and show what it holds; ``fully``: in every way, and certified.

    Returns
    -------
    str
        ``"refused"``, ``"shown"``, or ``"shown but for …"`` with the typed error that something else led to.
        Any other error is raised, and what would steer a terminal is one.
    """
    with nothing_else_happens():
        try:
            plan = hybridremat.Plan.load(path)
        except PlanFormatError:
            return "refused"
    try:
        _show(plan)
        if fully:
            _write(plan, path)
            _show(plan.certified(progress=False))
    except PlanFormatError:
        raise  # what is read has been looked at
    except HybridRematError as error:
        return f"shown but for {type(error).__name__}"
    return "shown"


def _show(plan: hybridremat.Plan) -> None:
    out = io.StringIO()
    render(plan_tables(plan, everything=True), out)
    shown = [str(plan), out.getvalue()]
    for part in (plan, *plan.parts):
        shown += [str(part.inspect(block)) for block in range(len(part.blocks))[:1]]
        modules = [name for block in part.blocks for name in block.modules]
        shown += [str(part.explain(name)) for name in modules[:1]]
    for text in shown:
        text.encode()
        assert "\x1b" not in text


def _write(plan: hybridremat.Plan, path: Path) -> None:
    json.dumps([plan.inspect(block).to_dict() for block in range(len(plan.blocks))])
    plan.to_html(path.with_suffix(".html"))
    plan.to_trace(path.with_suffix(".trace"))
    plan.to_memory_viz(path.with_suffix(".pickle"))
    plan.save(path.with_suffix(".again"))
    assert hybridremat.Plan.load(path.with_suffix(".again")).to_dict() == plan.to_dict()


def applied(path: Path, file: str) -> str:
    """Train with a file what it is for: ``"trained"``, or ``"not applied: …"`` with the typed error.

    Any other error is raised, as are other numbers than plain training's.
    """
    model, batch = made(file)
    plain = copy.deepcopy(model)
    try:
        hybridremat.wrap(model, kwargs=batch, plan=path, cache=False, progress=False)
    except HybridRematError as error:
        return f"not applied: {type(error).__name__}"
    assert train(plain, batch).differences(train(model, batch)) == []
    return "trained"


_watched = False


class ForbiddenError(AssertionError):
    """Something was run, written or sent while a file was read."""


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched:
        return
    if event == "open":
        written = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if written:
            raise ForbiddenError(f"opened to write: {arguments}")
    elif event.startswith(("os.", "subprocess.", "socket.", "shutil.", "pickle.")) and event not in ALLOWED:
        raise ForbiddenError(f"{event} {arguments}")


ALLOWED = {"os.listdir", "os.scandir"}
"""What imports do."""


@contextmanager
def nothing_else_happens() -> Iterator[None]:
    """Meanwhile, a process that is started, a file that is written, a socket: a ``ForbiddenError``."""
    global _watched
    if not getattr(sys, "_plans_are_watched", False):
        sys.addaudithook(_watch)  # there to the end of the process, and asleep
        sys._plans_are_watched = True  # type: ignore[attr-defined]
    _watched = True
    try:
        yield
    finally:
        _watched = False
