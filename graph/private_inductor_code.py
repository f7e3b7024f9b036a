"""Reads the code that Inductor has generated of a graph; with ``private_inductor`` all that uses its names.

Read and run with torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from torch._inductor import ir
from torch._inductor.codegen import wrapper

from hybridremat.graph.generated_code import BufferEvent, LoweredCode, Result
from hybridremat.graph.private_torch import tree_leaves


def code_of(lowering: Any) -> LoweredCode:
    """The code that a lowered graph has generated; ``lowering`` is Inductor's ``GraphLowering``."""
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
    for line in lowering.wrapper_code.lines:
        if isinstance(line, wrapper.AllocateLine):
            yield BufferEvent("alloc", line.node.get_name(), _bytes(lowering, line.node))
        elif isinstance(line, wrapper.ReuseLine):
            kind: Literal["move", "alias"] = "move" if line.delete_old else "alias"
            yield BufferEvent(kind, line.reused_as.get_name(), source=line.node.get_name())
        elif isinstance(line, wrapper.ReinterpretLine):
            yield BufferEvent("alias", line.reused_as.get_name(), source=line.node.get_name())
        elif isinstance(line, wrapper.FreeIfNotReusedLine):
            if not line.is_reused:
                yield from (BufferEvent("free", name) for name in _names(line.node))
        elif isinstance(line, wrapper.FreeLine):
            yield BufferEvent("free", line.node.get_name())
        elif isinstance(line, wrapper.ExternKernelAllocLine):
            yield from _made_by_call(lowering, line.node)
        elif isinstance(line, wrapper.ExternKernelOutLine):
            yield _call(line.node)
        elif isinstance(line, wrapper.MultiOutputLine):
            yield BufferEvent("alias", line.result_name, source=f"{line.arg_name}:{line.result_name}")


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


def _made_by_call(lowering: Any, node: Any) -> Iterator[BufferEvent]:
    """A kernel that allocates its own results: one tensor, or a tuple that holds several."""
    name = node.get_name()
    results = []
    if isinstance(node.get_output_spec(), ir.MultiOutputLayout):
        results = [(f"{name}:{item.get_name()}", item) for item in _items(node)]
    elif not isinstance(node.get_output_spec(), ir.NoneLayout) and not node.get_inputs_that_alias_output():
        results = [(name, node)]
    yield from (BufferEvent("alloc", held, _bytes(lowering, item)) for held, item in results)
    yield _call(node)
