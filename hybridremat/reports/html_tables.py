"""Tables of the texts, ops and values in a report's data: each is written once, and referred to by row."""

from __future__ import annotations

from typing import Any

from hybridremat.graph.joint import JointGraph, short_op
from hybridremat.plans.records import ValueRecord

_PHASES = {"forward": 0, "optional": 1, "backward": 2}


class Tables:
    """The tables of one graph, filled as rows are asked for.

    Attributes
    ----------
    texts
        Module paths, op names, shapes and other strings.
    ops
        Rows of op, module and source (rows of ``texts``) and phase (0 forward, 1 optional, 2 backward).
    values
        Rows of name, bytes, shape, dtype, op, module and source (rows of ``texts``), and nanoseconds.
    """

    def __init__(self, graph: JointGraph | None) -> None:
        self._graph = graph
        self._rows: dict[object, int] = {}
        self.texts: list[str] = []
        self.ops: list[list[int]] = []
        self.values: list[list[Any]] = []

    def text(self, text: str) -> int:
        """The row of a text."""
        return self._row(("text", text), self.texts, lambda: text)

    def op(self, op_id: int, graph: JointGraph, *, in_place: bool = False) -> int:
        """The row of an op, as ``graph`` runs it in one execution."""
        op = graph.ops[op_id]
        how = [text for text in (op.parts_text, "in place" if in_place else "") if text]
        texts = (", ".join([short_op(op.target), *how]), op.module, op.source)
        return self._row(
            ("op", op_id, *how), self.ops, lambda: [*map(self.text, texts), _PHASES[op.phase.value]]
        )

    def value(self, value_id: int) -> int:
        """The row of a value of the graph."""
        assert self._graph is not None
        value, op = self._graph.values[value_id], self._graph.producer(value_id)
        made = ("", "", "", 0) if op is None else (op.target, op.module, op.source, op.time)
        record = ValueRecord(value.name, value.bytes, value.shape, value.dtype, *made, id=value_id)
        return self.record(record)

    def record(self, record: ValueRecord) -> int:
        """The row of a value as a plan records it."""
        shape = "×".join(map(str, record.shape)) or "scalar"
        texts = (shape, record.dtype, short_op(record.op), record.module, record.source)
        key = ("value", record if record.id < 0 else record.id)
        return self._row(
            key, self.values, lambda: [record.name, record.bytes, *map(self.text, texts), record.time]
        )

    def _row(self, key: object, rows: list[Any], make: Any) -> int:
        if key not in self._rows:
            row = make()
            self._rows[key] = len(rows)
            rows.append(row)
        return self._rows[key]
