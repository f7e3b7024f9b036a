"""Texts, ops and values of a report's data: written once, and named by their place everywhere else."""

from __future__ import annotations

from typing import Any

from hybridremat.graph.joint import JointGraph, short_op
from hybridremat.plans.records import ValueRecord

_PHASES = {"forward": 0, "optional": 1, "backward": 2}


class Tables:
    """Collects what the data of one graph refers to.

    Attributes
    ----------
    texts
        Module paths, op names, shapes, and whatever else recurs.
    ops
        Rows of op, module and source (places in ``texts``) and phase (0 forward, 1 optional, 2 backward).
    values
        Rows of name, bytes, shape, dtype, op, module and source (places in ``texts``), and nanoseconds.
    """

    def __init__(self, graph: JointGraph | None) -> None:
        self._graph = graph
        self._places: dict[object, int] = {}
        self.texts: list[str] = []
        self.ops: list[list[int]] = []
        self.values: list[list[Any]] = []

    def text(self, text: str) -> int:
        """The place of a text."""
        return self._place(("text", text), self.texts, lambda: text)

    def op(self, op_id: int) -> int:
        """The place of an op of the graph."""
        assert self._graph is not None
        op = self._graph.ops[op_id]
        texts = (short_op(op.target), op.module, op.source)
        return self._place(
            ("op", op_id), self.ops, lambda: [*map(self.text, texts), _PHASES[op.phase.value]]
        )

    def value(self, value_id: int) -> int:
        """The place of a value of the graph."""
        assert self._graph is not None
        value, op = self._graph.values[value_id], self._graph.producer(value_id)
        made = ("", "", "", 0) if op is None else (op.target, op.module, op.source, op.time)
        record = ValueRecord(value.name, value.bytes, value.shape, value.dtype, *made, id=value_id)
        return self.record(record)

    def record(self, record: ValueRecord) -> int:
        """The place of a value by what a plan tells of it."""
        shape = "×".join(map(str, record.shape)) or "scalar"
        texts = (shape, record.dtype, short_op(record.op), record.module, record.source)
        key = ("value", record if record.id < 0 else record.id)
        return self._place(
            key, self.values, lambda: [record.name, record.bytes, *map(self.text, texts), record.time]
        )

    def _place(self, key: object, rows: list[Any], make: Any) -> int:
        if key not in self._places:
            row = make()
            self._places[key] = len(rows)
            rows.append(row)
        return self._places[key]
