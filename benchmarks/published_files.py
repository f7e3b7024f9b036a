"""Graphs and results that others published, read from their own files: MONeT's and Moccasin's.

Their files stay theirs, and none is in this repository. Pickles are read without running any of their code:
what is no plain container or number becomes an object with attributes and nothing else.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

LIMIT: Final = 2**20  # KiB in what MONeT's scripts call a GB


@dataclass(frozen=True)
class Theirs:
    """A published result under a budget: extra time and bound as shares of each op once, None if not said."""

    method: str
    overhead: float | None
    seconds: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class Instance:
    """A graph under one budget.

    ``backward`` is empty where it is no training step. ``further`` are further outputs of ops: each once is
    part of its op's time, and again takes as long as that.
    """

    name: str
    ops: Sequence[int]
    edges: Sequence[tuple[int, int]]
    bytes: Sequence[int]
    times: Sequence[int]
    backward: Sequence[int]
    budget: int | str
    theirs: Theirs | None
    further: Sequence[int] = ()


class _Record:
    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


class _Kind(_Record):
    """A NumPy type by its code, such as i8; what else a pickle says of it is not read."""

    def __init__(self, code: str, *_: object) -> None:
        self.code = code


def _number(kind: _Kind, content: bytes) -> int | float:
    if kind.code not in ("i4", "i8", "f4", "f8"):
        raise ValueError(f"a pickled number of kind {kind.code!r}")
    return np.frombuffer(content, f"<{kind.code}")[0].item()


class _Reader(pickle.Unpickler):
    """Makes plain containers and numbers, and of all else records: arrays, too, are empty ones."""

    PLAIN: Final = {"builtins": {"set", "list"}, "collections": {"defaultdict"}}

    def find_class(self, module: str, name: str) -> Any:
        if name in self.PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module.partition(".")[0] == "numpy" and name in ("dtype", "scalar"):
            return _Kind if name == "dtype" else _number
        return (lambda *_: _Record) if name == "getattr" else _Record


def monet(folder: Path) -> Iterator[Instance]:
    """Checkmate's schedules for graphs that MONeT's authors profiled (utsaslab/monet-schedules).

    Bytes are in KiB and times in 10 µs; what Gurobi proved is in the log beside a schedule.
    """
    bounds = _gurobi_bounds(folder)
    for file in sorted(folder.rglob("checkmate_solution_*.pkl")):
        with file.open("rb") as opened:
            graph, solution = _Reader(opened).load()
        nodes = [graph.nodes[number] for number in range(graph.size)]
        times = [round(100 * node.workspace_compute[0]) for node in nodes]
        limit = float(file.stem.rpartition("_")[2])
        once = sum(times)
        taken = solution.runtime_expected
        bound = bounds.get((graph.model_name, graph.bs, taken))
        yield Instance(
            name=f"MONeT {graph.model_name} ({graph.bs}), {limit:g} GB",
            ops=range(graph.size),
            edges=sorted({(int(edge[0]), int(edge[1])) for edge in graph.edge_list}),
            bytes=[round(node.mem / 1024) for node in nodes],
            times=times,
            backward=range(graph.loss + 1, graph.size),
            budget=int(limit * LIMIT) - round(nodes[-1].fixed_mem / 1024),
            theirs=Theirs(
                "Checkmate",
                taken / once - 1,
                solution.solve_time,
                None if bound is None else bound / once - 1,
            ),
        )


def _gurobi_bounds(folder: Path) -> dict[tuple[str, int, int], float]:
    """By model, batch and the objective of its best solution, what Gurobi says it proved."""
    found = {}
    for file in folder.rglob("checkmate_*"):
        if file.suffix == ".pkl" or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        model, batch = (re.search(rf"^{what}\s+(\S+)", text, re.M) for what in ("Model", "Batch size"))
        if model and batch:
            for best, bound in re.findall(r"Best objective ([\d.e+]+), best bound ([\d.e+]+)", text):
                found[model[1], int(batch[1]), int(float(best))] = float(bound)
    return found


SHARES: Final = (90, 80, 70)
"""Budgets of Moccasin's graphs, in percent of what their own order takes."""

TABLES: Final = {
    ("fcn_8_vgg", 90): 0.0, ("fcn_8_vgg", 80): 0.1,
    ("ResNet50", 90): 0.2, ("ResNet50", 80): 0.3,
}  # fmt: skip
"""Extra time in percent that Moccasin's authors print (Bartan et al., ICML 2023), to one decimal."""


def moccasin(folder: Path) -> Iterator[Instance]:
    """Checkmate's training graphs and random layered graphs (haoming-codes/moccasin, ``data``)."""
    for file in sorted(folder.rglob("*.json")):
        if not file.stem.endswith("_train_nx") and not file.stem.startswith("random_layered"):
            continue
        graph = json.loads(file.read_text(encoding="utf-8"))
        layered = file.stem.startswith("random_layered")
        size, time, ends = (
            ("out_cost", "duration", "01") if layered else ("cost_ram", "cost_cpu", ("source", "target"))
        )
        nodes = {node.get("id", node["name"]): node for node in graph["nodes"]}
        ops = graph["graph"].get("order", sorted(nodes))
        for share in SHARES[:2] if layered else SHARES:
            name = file.stem.partition(" ")[0]
            known = TABLES.get((name, share))
            yield Instance(
                name=f"Moccasin {f'random layered ({len(ops)})' if layered else name}, {share} %",
                ops=ops,
                edges=[(link[ends[0]], link[ends[1]]) for link in graph["links"]],
                bytes=[nodes[op][size] for op in ops],
                times=[nodes[op][time] for op in ops],
                backward=[op for op in ops if nodes[op].get("backward")],
                budget=f"{share}%",
                theirs=None if known is None else Theirs("Moccasin", known / 100),
            )
