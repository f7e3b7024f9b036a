"""What Dynamo is given to keep: nothing that reaches a step, or its model.

Dynamo keeps backends, and what they return, where Python's garbage collector does not look (entries of code
objects), and as globals of code with graph breaks, which it does not take away. If these held the step, and
so its model, neither would ever be freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from hybridremat.compiler.forgetting import forget_soon
from hybridremat.graph.private_dynamo import compiled_by, forget_code_of, reset_code

if TYPE_CHECKING:
    from hybridremat.compiler.backend import Backend


class DynamoBackend:
    """What Dynamo may keep in place of a backend, which is held by who runs the step."""

    def __init__(self, backend: Backend) -> None:
        self._backend = weakref.ref(backend)

    def __call__(self, module: Any, example_inputs: Any, **how: object) -> Callable[..., Any]:
        """Capture one of Dynamo's graphs; what runs it as long as the backend is there."""
        backend = self._backend()
        assert backend is not None, "a step is there while its code is compiled"
        run = backend(module, example_inputs, **how)
        call = _weakly(run)
        backend.runs[call] = run
        return call


def compiled_for(backend: Backend, call: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """``torch.compile`` of a call. Once that is gone, Dynamo forgets it, and all that it compiled within.

    Compiled code and the code object refer to each other, and would never be freed.
    """
    forget = partial(forget_code_of, backend.for_dynamo, backend.codes)
    for each in (partial(reset_code, call.__code__), forget):
        weakref.finalize(call, forget_soon, each).atexit = False
    return compiled_by(backend.for_dynamo, call, **how)


def _weakly(run: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.ref(run)

    def call(*args: object) -> Any:
        found = reference()
        assert found is not None, "a step is there while its code runs"
        return found(*args)

    return call
