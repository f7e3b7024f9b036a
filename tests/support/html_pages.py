"""Plans of hand-made nets, planned in a moment without torch, and what their reports hold."""

import json
import re
from dataclasses import replace

from hybridremat.planning.choose import plan_of_point
from hybridremat.planning.plan import Plan
from hybridremat.planning.planner import plan_graph
from hybridremat.plans.origin import Origin, TensorSpec
from hybridremat.plans.records import StepComposition, StepSection
from hybridremat.sequence.judge import Judge
from support.nets import transformer
from support.quick_planning import QUICK

INPUTS = (TensorSpec("x", (4, 16), "float32"),)
ORIGIN = Origin("TinyNet", INPUTS, 1234, 4936, "cpu", "a machine", "0.1", "2.13")


def named_graph(layers: int):
    """A Transformer of 10 ops a layer whose ops and values are named as captured ones are."""
    graph = transformer(layers, width=100_000)
    ops = tuple(  # two ops come before the first layer
        replace(
            op,
            target=f"aten.{op.target}.default",
            module="" if op.target == "add" else f"transformer.h.{(op.id - 2) // 10}.{op.target}",
            source=f"/somewhere/site-packages/model/modeling.py:{100 + op.id % 10}",
            temp=1000 * len(op.target),
        )
        for op in graph.ops
    )
    values = tuple(replace(v, shape=(v.bytes // 4,), dtype="float32") for v in graph.values)
    return replace(graph, ops=ops, values=values, fingerprint=f"transformer of {layers}")


def planned(layers: int, share: float) -> Plan:
    """A plan of ``share`` of the way from the least peak to the plain one."""
    frontier = plan_graph(named_graph(layers), cache=QUICK, workers=1)
    least, plain = frontier.candidates[0].peak, frontier.plain.peak
    limit = round(least + share * (plain - least))
    chosen = frontier.choose(limit, None)
    return plan_of_point(
        frontier,
        chosen,
        limit=limit,
        asked=limit,
        cost_model="flops",
        origin=ORIGIN,
    )


def joined(*parts: Plan) -> Plan:
    """A step of several graphs, with code before the second one that keeps 4,000 bytes."""
    sections = []
    for number, part in enumerate(parts):
        phases = Judge(part.details.graph).phases(part.schedule)
        left = sum(part.details.graph.values[value].bytes for value in part.details.graph.gradients)
        figures = phases.forward, phases.backward, phases.between, left, 0
        sections.append(StepSection(number, "a.unit" if number == 1 else "", *figures))
    sections.insert(1, StepSection(None, "", 8_000, 4_000, 4_000, 0, 0))
    composition = StepComposition(tuple(sections), 0, 0)
    return replace(parts[0], parts=parts, composition=composition, details=None, blocks=())


def data_of(page: str):
    """The data that a page draws from."""
    (text,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def unpacked(changes: list[int], length: int) -> list[int]:
    """A band's bytes at each point, from its changes."""
    row = [0] * length
    for at, size in zip(changes[::2], changes[1::2], strict=True):
        row[at:] = [size] * (length - at)
    return row
