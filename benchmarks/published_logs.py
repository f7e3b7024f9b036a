"""Logs of training steps that DTR's authors recorded, as graphs of ops with one output each."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from published_files import Instance, Theirs

SIMULATED: Final[dict[str, tuple[int, dict[int, float | None]]]] = {
    "unet (6)": (8415764640, {80: 5.769, 60: 13.080, 50: 15.875, 40: None}),
    "densenet121 (84)": (11020749360, {80: 6.378, 60: 14.139, 40: 27.145, 20: 67.943}),
    "inceptionv4 (64)": (11245348984, {80: 2.444, 60: 6.841, 40: 13.056, 30: 21.892}),
    "resnet32 (56)": (10061179152, {80: 2.483, 60: 7.367, 50: 10.678, 40: 14.039, 30: 17.825, 20: 37.108}),
}
"""Of each log, the bytes of a step in which nothing is evicted, constants in it, and the extra time in
percent under shares of them (None: out of memory), as measured here with the simulator beside the logs
(``RuntimeV2EagerOptimized``, heuristic ``DTR``)."""


@dataclass
class _Step:
    """What has been read of a log: ops by number, and for each name the ops that whoever reads it reads."""

    names: dict[str, frozenset[int]] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)  # bytes of what a name stands for
    reads: list[frozenset[int]] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    further: list[int] = field(default_factory=list)
    backward: int | None = None  # its first op
    constants: int = 0

    def read(self, lines: Iterable[dict[str, Any]]) -> None:
        """Read what is behind the line that says where the step begins."""
        rest = iter(lines)
        for line in rest:
            if line.get("ANNOTATION") == "START":
                break
        for line in rest:
            kind = line["INSTRUCTION"]
            if kind == "CONSTANT":
                self._constant(line["NAME"], int(next(rest)["MEMORY"]))
            elif kind in ("COPY", "COPY_FROM"):
                self._name(line["DST"], self.names[line["SRC"]], self.storages[line["SRC"]])
            elif kind == "RELEASE":
                self.names.pop(line["NAME"], None)
            elif kind == "CALL":
                outputs = [(next(rest), next(rest)) for _ in line["RESULT"]]
                self._call(line, [(int(size["MEMORY"]), int(of["ALIAS"])) for size, of in outputs])
            elif kind == "MUTATE":
                self._mutate(line)
            elif line.get("ANNOTATION") == "BACKWARD":
                self.backward = len(self.reads)
            else:
                raise ValueError(f"a line of a log that is not known: {line}")
        self._op(frozenset().union(*self.names.values()), 0, 0)

    def _name(self, name: str, reads: frozenset[int], size: int) -> None:
        self.names[name], self.storages[name] = reads, size

    def _constant(self, name: str, size: int) -> None:
        self._name(name, frozenset(), size)
        self.constants += size

    def _op(self, reads: frozenset[int], size: int, time: int) -> int:
        self.reads.append(reads)
        self.bytes.append(size)
        self.times.append(time)
        return len(self.reads) - 1

    def _call(self, line: dict[str, Any], outputs: list[tuple[int, int]]) -> None:
        """The largest output is the op's; each further one is an op that reads all of it, and takes as long.

        A view keeps what it is of.
        """
        args = line["ARGS"]
        reads = frozenset[int]().union(*(self.names[each] for each in args))
        made = {place: own for place, (own, alias) in enumerate(outputs) if alias < 0}
        first = max(made, key=made.__getitem__, default=-1)
        op = self._op(reads, made.pop(first, 0), int(line["TIME"]))
        makers = {first: op}
        for place, own in made.items():
            makers[place] = self._op(reads | {op}, own, int(line["TIME"]))
            self.further.append(makers[place])
        for place, (name, (own, alias)) in enumerate(zip(line["RESULT"], outputs, strict=True)):
            if alias < 0:
                self._name(name, frozenset({makers[place]}), own)
            else:
                self._name(name, self.names[args[alias]] | {op}, self.storages[args[alias]])

    def _mutate(self, line: dict[str, Any]) -> None:
        """A call that changes what it reads makes new ones of it, as in DTR's simulator."""
        changed = [line["ARGS"][place] for place in line["MUTATE"]]
        reads = frozenset[int]().union(*(self.names[each] for each in line["ARGS"]))
        size = sum(self.storages[each] for each in changed)
        op = frozenset({self._op(reads, size, int(line["TIME"]))})
        for each in changed:
            self.names[each] = op


def dtr(folder: Path) -> Iterator[Instance]:
    """Steps of DTR's authors (uwsampl/dtr-prototype, ``simrd/logs.zip``), under shares of what they take.

    Constants are there throughout: they are no ops, and their bytes are no part of the budget.
    """
    for file in sorted(folder.rglob("logs.zip")):
        with zipfile.ZipFile(file) as logs:
            for name in sorted(each for each in logs.namelist() if each.endswith(".log")):
                model, batch = Path(name).name.split("-")[:2]
                title = f"{model.removeprefix('tv_')} ({batch})"
                if title not in SIMULATED:
                    continue
                step = _Step()
                with logs.open(name) as opened:
                    step.read(json.loads(line) for line in opened if line.strip())
                most, shares = SIMULATED[title]
                for share, extra in shares.items():
                    yield _instance(step, f"DTR {title}, {share} %", most * share // 100, extra)


def _instance(step: _Step, name: str, budget: int, extra: float | None) -> Instance:
    count = len(step.reads)
    return Instance(
        name=name,
        ops=range(count),
        edges=[(maker, op) for op, reads in enumerate(step.reads) for maker in sorted(reads)],
        bytes=step.bytes,
        times=step.times,
        backward=range(count if step.backward is None else step.backward, count),
        budget=budget - step.constants,
        theirs=Theirs("DTR", None if extra is None else extra / 100),
        further=step.further,
    )
