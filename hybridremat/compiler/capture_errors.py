"""Errors of PyTorch's capture as ours: the user's own line, the reason in short, and last what helps."""

from __future__ import annotations

import re
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Final

import torch
from torch import nn

from hybridremat.compiler.backend import REMOVE_BREAK
from hybridremat.compiler.parts_beside import parts_beside
from hybridremat.errors import CaptureError, HybridRematError, InputError
from hybridremat.graph import joint
from hybridremat.graph.private_torch import GuardOnDataDependentSymNode

_NOT_THEIRS: Final = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    str(Path(joint.__file__).parent),
    "<",
)
"""Where frames are that belong to PyTorch or to hybridremat, or to no file."""

DATA_SIZE: Final = (
    "A size or a branch depends on the numbers, and memory is planned to the byte before any are known: pad "
    'or mask instead (torch.where, a fixed number of rows), or wrap with graph_breaks="plan", which breaks '
    "the graph there and plans both sides."
)
TRAINS_PLAINLY: Final = "trains plainly, but its graph breaks cannot be surveyed"

NO_GRADIENTS: Final = (
    "A survey runs the graphs between breaks without gradients, so code there cannot differentiate through "
    "them (torch.autograd.grad, .backward() or .grad_fn in a forward). Write a derivative with "
    "torch.func.grad (or jvp, vjp), which is captured in one graph, or take it outside of the wrapped "
    "model. A forward that is one graph may call torch.autograd.grad, without graph_breaks= and units=."
)
_NEEDS_GRADIENTS = re.compile(r"grad|differentia|backward", re.IGNORECASE)
OTHERWISE: Final = (
    'It fails only where PyTorch cuts the forward into graphs: torch.compile(model, backend="eager") shows '
    "whether it does without hybridremat. Keep that code outside of the wrapped model, or wrap the part that "
    "has none of it."
)
_SET_REQUIRES_GRAD: Final = (
    "Set requires_grad outside of the forward (transformers' audio models do it unless their feature encoder "
    "is frozen: model.freeze_feature_encoder()), write a derivative with torch.func.grad (or jvp, vjp), or "
    'wrap with graph_breaks="plan".'
)
_PACKED: Final = (
    "Packed sequences have shapes that depend on the data. Give the recurrent module padded tensors "
    '(batch_first as it is, and mask what it returns), or wrap with graph_breaks="plan", which runs the '
    "packing between two graphs."
)
_LOST_CONTEXT: Final = "Developer debug context: "
_RAISED = re.compile(r"raised exception (.*)")
_WRONG_CALL: Final = "TypeError when making fake tensor call"
_OP_RAISED = re.compile(r"""got (\w+)\((['"])(.*?)\.?\2\)""", re.DOTALL)
_ASSERTED = "assertion failed"


def as_capture_error(model: nn.Module, error: BaseException) -> HybridRematError:
    """Our error for what ended a capture: a graph break, or what the model itself raises on these inputs."""
    name, text, where = type(model).__name__, str(error), _place(error)
    if text.startswith(_WRONG_CALL):
        return InputError(
            f"{name} fails on these inputs{where}: {_reason(text)} Nothing has been run. Pass what one "
            "training step passes: args=(…) and kwargs={…}."
        )
    raised = _own_error(text)
    if raised:
        return InputError(
            f"{name} itself raises {raised}{where} on these inputs. Nothing has been run. Pass what one "
            "training step passes: args=(…) and kwargs={…}."
        )
    return CaptureError(
        f"the graph of {name} breaks, so the memory of the whole step cannot be planned. "
        f"Nothing has been run. The break is{where}: {_reason(text)}\n{_advice(text)}"
        f"{parts_beside(model, error)}",
        place=f" (it breaks{where}: {_reason(text).rstrip('.')})",
    )


def not_captured(model: nn.Module, error: BaseException) -> CaptureError:
    """Our error for what the compiler itself raised behind Dynamo."""
    place, text = _place(error), str(error)
    name, short = f"{type(model).__name__} could not be captured{place}", f" (it breaks{place})"
    if _depends_on_data(error):
        said = f"{name}: {text.splitlines()[0]}\n{DATA_SIZE}{parts_beside(model, error)}"
        return CaptureError(said, place=short)
    return CaptureError(f"{name}: {first_lines(text)}", place=short)


def without_gradients(model: nn.Module, error: BaseException, units: Collection[str]) -> CaptureError:
    """Our error for code between graphs that fails only in a survey; ``units``: their names, if there are."""
    said = first_lines(error)
    advice = NO_GRADIENTS if _NEEDS_GRADIENTS.search(said) else OTHERWISE
    if units:
        advice += " Or leave out of units= what that line differentiates through."
    else:
        advice += parts_beside(model, error)
    return CaptureError(
        f"{type(model).__name__} {TRAINS_PLAINLY}: "
        f"{type(error).__name__}{_place(error)}: {said}. {advice}"
    )


def first_lines(error: object) -> str:
    """The first lines of an error, in one."""
    return " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:3])


def own_words(error: BaseException) -> str:
    """What an op itself raised, and where, without what Dynamo says around it; else the first lines."""
    found = _OP_RAISED.search(str(error))
    return f"{found[1]}{_place(error)}: {found[3]}" if found else first_lines(error)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Where the traced code, or else Python, was in code that is neither PyTorch's nor ours."""
    stack = getattr(error, "real_stack", None) or traceback.extract_tb(error.__traceback__)
    own = [frame for frame in stack if not frame.filename.startswith(_NOT_THEIRS)]
    return own[-1] if own else None


def _place(error: BaseException) -> str:
    frame = own_frame(error)
    if frame is None:
        return ""
    line = f" ({frame.line})" if frame.line else ""
    return f" at {frame.filename}:{frame.lineno}{line}"


def _own_error(text: str) -> str:
    """What the model raises, where Dynamo met an exception that nothing catches; or empty."""
    found = _RAISED.search(text)
    if text.startswith("Observed exception") and found is not None:
        return found[1].strip()
    if _ASSERTED in text.partition("\n")[0] and "ConstantVariable(bool: False)" in text:
        return "AssertionError"
    return ""


def _reason(text: str) -> str:
    """The reason in PyTorch's words, without its hints and links."""
    lines = [line.strip() for line in text.partition("from user code:")[0].splitlines() if line.strip()]
    explained = next((line for line in lines if line.startswith("Explanation:")), "")
    context = next((line for line in lines if line.startswith(_LOST_CONTEXT)), "")
    parts = [lines[0] if lines else text, explained.removeprefix("Explanation:").strip()]
    if not parts[1]:
        parts.append(context.removeprefix(_LOST_CONTEXT))
    return ". ".join(part.rstrip(".") for part in parts if part) + "."


def _advice(text: str) -> str:
    if "requires_grad" in text.partition("\n")[0]:
        return _SET_REQUIRES_GRAD
    head = text.partition("from user code:")[0]
    if "pack_padded_sequence" in head or "pack_sequence" in head or "PackedSequence" in head:
        return _PACKED
    if "Could not guard on data-dependent" in head or "Dynamic shape operator" in head:
        return DATA_SIZE
    return REMOVE_BREAK


def _depends_on_data(error: BaseException) -> bool:
    return isinstance(error, GuardOnDataDependentSymNode) or "data-dependent" in str(error)
