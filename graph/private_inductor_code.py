"""Reads the code that Inductor has generated of a graph; with ``private_inductor`` all that uses its names.

Read and run with torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import torch
from torch._inductor import ir
from torch._inductor.utils import DeferredLineBase, LineContext

from hybridremat.errors import GeneratedCodeError
from hybridremat.graph.generated_code import BufferEvent, LoweredCode, Result
from hybridremat.graph.private_inductor_lines import HIDING, NEUTRAL
from hybridremat.graph.private_torch import tree_leaves


def code_of(lowering: Any) -> LoweredCode:
    """The code that a lowered graph has generated; ``lowering`` is Inductor's ``GraphLowering``.

    Raises
    ------
    GeneratedCodeError
        If it has lines whose memory is not known.
    """
    results = tuple(_result(lowering, result) for result in lowering.graph_outputs)
    return LoweredCode(tuple(_events(lowering)), results)


def _result(lowering: Any, result: Any) -> Result:
    if not isinstance(result, ir.IRNode) or not result.has_tensor_output():
        return Result()
    name, strides = result.get_name(), tuple(int(stride) for stride in result.get_layout().stride)
    buffer = lowering.name_to_buffer.get(name)
    return Result(name, 0 if buffer is None else _bytes(lowering, buffer), strides)


def _bytes(lowering: Any, buffer: Any) -> int:
    return int(lowering.get_allocation_storage_size(buffer)) * int(buffer.get_dtype().itemsize)


def _call(node: Any) -> BufferEvent:
    layouts = []
    for given in node.inputs:
        if isinstance(given, ir.IRNode) and given.has_tensor_output():
            size, strides = given.get_size(), given.get_stride()
            layouts.append((tuple(map(int, size)), tuple(map(int, strides))))
    return BufferEvent("call", node.get_name(), nodes=_origins(node), layouts=tuple(layouts))


def _origins(node: Any) -> tuple[str, ...]:
    own = getattr(node, "origin_node", None)
    first = [own.name] if own is not None else []
    return tuple(dict.fromkeys([*first, *(origin.name for origin in node.get_origins())]))


def _events(lowering: Any) -> Iterator[BufferEvent]:
    """The memory events of a lowered graph whose code has been generated."""
    code = lowering.wrapper_code
    if code.subgraph_definitions.getvalue():
        raise _unknown("a graph inside the graph", "whose memory has no lines")
    for line in code.lines:
        if isinstance(line, _TEXT):
            continue
        kind = type(line).__name__  # not isinstance: a class that is derived from a known one is another
        read = _READERS.get(kind)
        if read is not None:
            yield from read(lowering, line)
        elif kind not in NEUTRAL:
            raise _unknown(f"a {kind}", HIDING.get(kind, "which hybridremat does not know"))


_TEXT = (str, LineContext, DeferredLineBase)
"""Code as text: names, checks, kernels that write into what is there; of what has memory there are lines."""


def _unknown(what: str, why: str) -> GeneratedCodeError:
    return GeneratedCodeError(
        f"the code that Inductor of torch {torch.__version__} generates of this step has {what}, {why}, so "
        'the memory of the compiled step is not known. Leave compiler="inductor" out, which is to say '
        'compiler="eager", or take a release of torch that this one of hybridremat supports; if it is one, '
        "please report the model and this message. Nothing has been run."
    )


def _alloc(lowering: Any, line: Any) -> Iterator[BufferEvent]:
    yield BufferEvent("alloc", line.node.get_name(), _bytes(lowering, line.node))


def _reuse(_: Any, line: Any) -> Iterator[BufferEvent]:
    kind: Literal["move", "alias"] = "move" if line.delete_old else "alias"
    yield BufferEvent(kind, line.reused_as.get_name(), source=line.node.get_name())


def _reinterpret(_: Any, line: Any) -> Iterator[BufferEvent]:
    yield BufferEvent("alias", line.reused_as.get_name(), source=line.node.get_name())


def _free_if_not_reused(_: Any, line: Any) -> Iterator[BufferEvent]:
    if not line.is_reused:
        yield from (BufferEvent("free", name) for name in _names(line.node))


def _free(_: Any, line: Any) -> Iterator[BufferEvent]:
    yield BufferEvent("free", line.node.get_name())


def _item(_: Any, line: Any) -> Iterator[BufferEvent]:
    yield BufferEvent("alias", line.result_name, source=f"{line.arg_name}:{line.result_name}")


def _fill(_: Any, line: Any) -> Iterator[BufferEvent]:
    yield _call(line.node)


def _fill_several(_: Any, line: Any) -> Iterator[BufferEvent]:
    """A kernel that writes into buffers which have lines of their own, and returns them in a tuple."""
    name = line.node.get_name()
    yield _call(line.node)
    for item in _items(line.node):
        yield BufferEvent("alias", f"{name}:{item.get_name()}", source=item.get_name())


def _names(node: Any) -> Iterator[str]:
    """The names under which a buffer is held: for a tuple of results one for each of them."""
    yield node.get_name()
    if isinstance(node.get_output_spec(), ir.MultiOutputLayout):
        yield from (f"{node.get_name()}:{item.get_name()}" for item in _items(node))


def _items(node: Any) -> Iterator[Any]:
    """The tensors in the tuple that a kernel returns, without views of its inputs."""
    for item in tree_leaves(getattr(node, "outputs", ())):
        if isinstance(item, ir.Buffer) and not item.get_inputs_that_alias_output():
            yield item


def _made_by_call(lowering: Any, line: Any) -> Iterator[BufferEvent]:
    """A kernel that allocates its own results: one tensor, or a tuple that holds several."""
    node, name = line.node, line.node.get_name()
    results = []
    if isinstance(node.get_output_spec(), ir.MultiOutputLayout):
        results = [(f"{name}:{item.get_name()}", item) for item in _items(node)]
    elif not isinstance(node.get_output_spec(), ir.NoneLayout) and not node.get_inputs_that_alias_output():
        results = [(name, node)]
    yield from (BufferEvent("alloc", held, _bytes(lowering, item)) for held, item in results)
    yield _call(node)


_READERS: Final[dict[str, Callable[[Any, Any], Iterator[BufferEvent]]]] = {
    "AllocateLine": _alloc,
    "ExternKernelAllocLine": _made_by_call,
    "ExternKernelMultiOutLine": _fill_several,
    "ExternKernelOutLine": _fill,
    "FreeIfNotReusedLine": _free_if_not_reused,
    "FreeLine": _free,
    "IndexPutFallbackLine": _fill,
    "MultiOutputLine": _item,
    "ReinterpretLine": _reinterpret,
    "ReuseLine": _reuse,
    "ScatterFallbackLine": _fill,
}
"""Lines that allocate, hand on or free buffers, or run a kernel of a library, by names of classes."""
