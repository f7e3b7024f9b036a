"""Peaks of plain forwards, by the part of their input that is charged."""

from __future__ import annotations

from hybridremat.graph.segmentation.chain import Chain


def value_bytes(chain: Chain, values: frozenset[int] | set[int]) -> int:
    """Bytes of a set of values; graph inputs and tangents are charged elsewhere."""
    return sum(chain.graph.values[v].bytes for v in values if chain.graph.values[v].producer is not None)


def plain_peaks(chain: Chain) -> tuple[tuple[int, ...], ...]:
    """pn[s][k]; it depends on s only through the held part of the input, so most entries repeat."""
    known: dict[tuple[int, frozenset[int]], int] = {}

    def peak(s: int, k: int) -> int:
        extra = chain.boundary[k] - chain.boundary[s] - chain.always if k > s else frozenset()
        key = (k, extra)
        if key not in known:
            known[key] = _plain_peak(chain, k, extra)
        return known[key]

    count = len(chain.blocks)
    return tuple(tuple(peak(s, k) if k >= s else 0 for k in range(count)) for s in range(count))


def _plain_peak(chain: Chain, k: int, extra: frozenset[int]) -> int:
    """Peak of one plain forward of block k, ``extra`` being the charged part of its input."""
    graph, block = chain.graph, chain.blocks[k]
    stay = chain.boundary[k + 1] | graph.released_outputs
    own = extra | {v for op in block.forward for v in graph.ops[op].writes} - chain.always
    last: dict[int, int] = {}
    for position, op in enumerate(block.forward):
        for value in (*graph.ops[op].reads, *graph.ops[op].writes):
            if value in own:
                last[value] = position
    dying: list[list[int]] = [[] for _ in block.forward]
    for value, position in last.items():
        if value not in stay:
            dying[position].append(value)
    live = peak = value_bytes(chain, extra)
    for op, dead in zip(block.forward, dying, strict=True):
        live += sum(graph.values[v].bytes for v in graph.ops[op].writes if v in own)
        peak = max(peak, live + graph.ops[op].temp)
        live -= sum(graph.values[v].bytes for v in dead)
    return peak
