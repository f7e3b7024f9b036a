"""Tables of the texts, ops and values in a report's data: each is written once, and referred to by row."""

from __future__ import annotations

from copy import copy
from typing import Any

from hybridremat.graph.joint import JointGraph, Phase, short_op
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
        self._graph, self._prefix = graph, 0
        self._rows: dict[object, int] = {}
        self.texts: list[str] = []
        self.ops: list[list[int]] = []
        self.values: list[list[Any]] = []

    def of_graph(self, number: int, graph: JointGraph) -> Tables:
        """The same tables, for another graph of the step; ``number`` is its own."""
        other = copy(self)
        other._graph, other._prefix = graph, number
        return other

    def text(self, text: str) -> int:
        """The row of a text."""
        return self._row(("text", text), self.texts, lambda: text)

    def code(self, name: str, phase: Phase) -> int:
        """The row of an op for code that is no op."""
        texts = (name, "", "")
        return self._row(("code", name, phase), self.ops, lambda: [*map(self.text, texts), _PHASES[phase]])

    def block(self, name: str, size: int) -> int:
        """The row of a value for bytes of which nothing more is known."""
        row = lambda: [name, size, *map(self.text, ("",) * 5), 0]  # noqa: E731
        return self._row(("block", name, size), self.values, row)

    def op(self, op_id: int, graph: JointGraph, *, in_place: bool = False) -> int:
        """The row of an op, as ``graph`` runs it in one execution."""
        op = graph.ops[op_id]
        how = [text for text in (op.parts_text, "in place" if in_place else "") if text]
        texts = (", ".join([short_op(op.target), *how]), op.module, op.source)
        return self._row(
            ("op", self._prefix, op_id, *how),
            self.ops,
            lambda: [*map(self.text, texts), _PHASES[op.phase.value]],
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
        key = ("value", self._prefix, record if record.id < 0 else record.id)
        return self._row(
            key, self.values, lambda: [record.name, record.bytes, *map(self.text, texts), record.time]
        )

    def _row(self, key: object, rows: list[Any], make: Any) -> int:
        if key not in self._rows:
            row = make()
            self._rows[key] = len(rows)
            rows.append(row)
        return self._rows[key]
