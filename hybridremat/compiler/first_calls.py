"""What a model sets up in its first call, done before its step is captured.

transformers installs the hooks that collect hidden states, attentions and router logits when a forward first
asks for them, under a lock (``transformers/utils/output_capturing.py``), which Dynamo cannot trace. Where a
capture fails there, the hooks are installed by the same function that the first call would use; a hook does
nothing unless an output is asked for. Nothing is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from hybridremat.graph.private_torch import innermost_frame

_CAPTURING, _MODELS = "transformers.utils.output_capturing", "transformers.modeling_utils"


def set_up_first_call(model: nn.Module, error: BaseException) -> bool:
    """Whether a capture failed at what a first call sets up, and it has now been set up."""
    install = _installer()
    place = innermost_frame(error)
    if install is None or place is None or place[:2] != (install.__code__.co_filename, install.__name__):
        return False
    # outermost first: what is installed for a model includes the models inside it, which are then marked
    for module in _capturing(model):
        install(module)
    return True


def set_up(model: nn.Module) -> int:
    """How many modules a first call has set up; it grows where a trial run was the first call."""
    return sum(getattr(module, "_output_capturing_hooks_installed", False) for module in _capturing(model))


def _capturing(model: nn.Module) -> list[nn.Module]:
    kind = getattr(sys.modules.get(_MODELS), "PreTrainedModel", ())
    return [module for module in model.modules() if isinstance(module, kind)]


def _installer() -> Callable[..., Any] | None:
    found = getattr(sys.modules.get(_CAPTURING), "maybe_install_capturing_hooks", None)
    return found if hasattr(found, "__code__") else None
