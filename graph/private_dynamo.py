"""What Dynamo keeps of code that it compiled, and what it does at the call of a module that is planned."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from types import CodeType
from typing import Any, Final, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import (
    _debug_get_cache_entry_list,
    get_eval_frame_callback,
    reset_code,
)
from torch._dynamo import config as dynamo_config
from torch._dynamo import eval_frame
from torch._dynamo.convert_frame import compile_lock, input_codes, output_codes, register_bytecode_hook
from torch._dynamo.guards import DeletedGuardManagerWrapper, GuardBuilder, install_guard
from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable
from torch.fx import GraphModule

__all__ = [
    "compile_lock",
    "compiled_by",
    "forget_code_of",
    "is_switched_off",
    "noting_code",
    "replace_call",
    "reset_code",
    "usual_stance",
    "without_marks",
]

_CALL: Final = "_compiled_call_impl"  # where nn.Module.compile puts a module's call
MANY_DEAD = 64  # entries of a code object that are no longer valid: Dynamo counts them against its limit
_DYNAMIC = "dynamic", "weak_dynamic", "propagated_dynamic", "unbacked", "strict_unbacked"
_BESIDE = "dynamic_range", "hint_overrides", "unbacked_bounds", "shape_ids"
_KINDS = *(f"{kind}_indices" for kind in _DYNAMIC), *_BESIDE
_MARKS = {"_specialize_on", *(f"_dynamo_{kind}" for kind in _KINDS)}
_STATIC, _ANY = "_dynamo_static_indices", "_has_dynamo_dim_marking"
_TYPE = re.compile(r"___check_type_id\((?P<source>.*?), (?P<type>\d+)\)")
_PLAIN = Tensor, nn.Parameter
_NO_OWN_FORWARD = re.compile(r"not ___dict_contains\('forward', (?P<source>.*?)\.__dict__\)")


@contextmanager
def noting_code(note: Callable[[CodeType], None]) -> Iterator[None]:
    """Note the code objects that Dynamo compiles."""

    def compiled(code: CodeType, new_code: CodeType) -> None:
        del new_code
        note(code)

    handle = register_bytecode_hook(compiled)
    try:
        yield
    finally:
        handle.remove()


def compiled_by(backend: object, call: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``torch.compile`` of a call; Dynamo, which would keep the backend for good, keeps nothing of it."""
    compiled = torch.compile(call, backend=cast("Any", backend), **how)
    # for torch._dynamo.reset() alone, which resets backends that can be
    kept: dict[int, object] = getattr(eval_frame, "cached_backends", {})
    for key, wrapped in list(kept.items()):
        if getattr(wrapped, "compiler_fn", wrapped) is backend:
            kept.pop(key, None)
    return compiled


def forget_code_of(backend: object, codes: Iterable[CodeType]) -> None:
    """Let Dynamo forget what it compiled of some code objects for one backend."""
    _forget(codes, lambda entry: _backend_of(entry) is backend)


def replace_call(module: nn.Module, call: object, *, except_by: type) -> None:
    """Replace a module's call as ``nn.Module.compile`` does, also in code that Dynamo compiles or compiled.

    Nothing tells it that the call of a module has been replaced, so what it compiled with one traced in is
    forgotten. What it knows of modules is their class: calls of others of that class are traced anew, too.
    What backends of the class ``except_by`` compiled stays, but beside many dead entries (``_forget``).
    """
    kind, put = cast("Any", type(module)), cast("Any", type(call))  # hashable, though mypy doubts it
    _let_calls_be(put)
    _replaced.add(kind)
    setattr(module, _CALL, call)

    def has_call(entry: Any) -> bool:
        return not isinstance(_backend_of(entry), except_by) and _has_call_of(kind, entry)

    known = (reference() for reference in [*input_codes.seen, *output_codes.seen])
    _forget((code for code in known if code is not None), has_call)


def _backend_of(entry: Any) -> object:
    return getattr(entry.backend, "compiler_fn", entry.backend)  # torch.compile puts one around it


def _has_call_of(kind: type[nn.Module], entry: Any) -> bool:
    """Whether a compiled function calls a module of a class: its guards want it without an own forward."""
    text = str(entry.guard_manager)  # its parts leave out what is below a dictionary
    called = {found["source"] for found in _NO_OWN_FORWARD.finditer(text)}
    return any(int(found["type"]) == id(kind) and found["source"] in called for found in _TYPE.finditer(text))


def _forget(codes: Iterable[CodeType], unwanted: Callable[[Any], bool]) -> None:
    """Let Dynamo forget some entries of code objects.

    What is no longer valid stays in its list, so now and then all of a code object goes; what others have
    compiled of it is captured again then, and runs as it was planned. Compiling in another thread goes over
    the same lists.
    """
    with compile_lock:
        for code in codes:
            _forget_of(code, unwanted)


def _forget_of(code: CodeType, unwanted: Callable[[Any], bool]) -> None:
    entries = _debug_get_cache_entry_list(code)
    for entry in entries:
        state = getattr(entry.guard_manager, "extra_state", None)
        if state is not None and unwanted(entry):
            state.invalidate(entry, DeletedGuardManagerWrapper("its step is gone"))
    dead = sum(entry.backend is None for entry in entries)
    if entries and (dead == len(entries) or dead >= MANY_DEAD):
        reset_code(code)


def is_switched_off() -> bool:
    """Whether ``torch.compile`` compiles nothing, by a setting or a variable of the environment."""
    return bool(dynamo_config.disable) or os.environ.get("TORCHDYNAMO_DISABLE") == "1"


class _UsualStance:
    """The stance of compiled code that was set, while threads run what takes no notice of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._set, self._usual = eval_frame._stance, eval_frame.DynamoStance()

    def enter(self) -> None:
        with self._lock:
            self._running += 1
            if eval_frame._stance != self._usual:
                self._set = eval_frame._set_stance(self._usual)

    def leave(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running and eval_frame._stance is self._usual:  # no thread has set another
                eval_frame._set_stance(self._set)


_STANCE: Final = _UsualStance()


@contextmanager
def usual_stance() -> Iterator[None]:
    """Run what is compiled as it was compiled, whatever ``torch.compiler.set_stance`` says of such code.

    Stances are the process's: one that another thread sets meanwhile begins when the last such run has ended.
    """
    if get_eval_frame_callback() not in (None, False):  # inside of compiled code it cannot be set
        yield
        return
    _STANCE.enter()
    try:
        yield
    finally:
        _STANCE.leave()


@contextmanager
def without_marks(values: Iterable[object], *, static: bool) -> Iterator[None]:
    """Hide what makes Dynamo take sizes for symbols: compiled code marks tensors that it takes and makes.

    ``static``: hide, too, what makes it take them for numbers.
    """
    tensors = {id(each): each for each in values if isinstance(each, Tensor) and type(each) in _PLAIN}
    hidden = [(tensor, name) for tensor in tensors.values() for name in _marks_of(tensor, static)]
    marks = [vars(tensor).pop(name) for tensor, name in hidden]
    try:
        yield
    finally:
        for (tensor, name), mark in zip(hidden, marks, strict=True):
            setattr(tensor, name, mark)


def _marks_of(tensor: Tensor, static: bool) -> set[str]:
    """The names of the marks on a tensor that are to be hidden."""
    found = _MARKS.intersection(vars(tensor))
    stays = _STATIC in vars(tensor) and not static
    return found if stays else found | ({_STATIC, _ANY} & vars(tensor).keys())


_replaced: WeakSet[Any] = WeakSet()  # classes of modules whose calls are or were replaced; some become others


@cache
def _let_calls_be(kind: type) -> None:
    """Let Dynamo trace the call of a module where ``nn.Module.compile`` has put an object of this class.

    It takes in a module's own forward instead, whatever has been put there. What it compiles with the call of
    another module of that class must not be taken for a module with such an object.
    """
    usual = UnspecializedNNModuleVariable.call_function
    absent = partial(GuardBuilder.NOT_PRESENT_IN_GENERIC_DICT, attr=_CALL)

    @wraps(usual)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        module = self.value
        own = isinstance(module, GraphModule) or type(module).__call__ is nn.Module.__call__
        if own and isinstance(getattr(module, _CALL, None), kind):
            return self.call_method(tx, "_wrapped_call_impl", list(args), kwargs)
        if self.source and _CALL not in vars(module) and not _replaced.isdisjoint(type(module).__mro__):
            install_guard(self.source.make_guard(absent))
        return usual(self, tx, args, kwargs)

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]
