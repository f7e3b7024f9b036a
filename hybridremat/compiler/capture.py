"""Compile a model's training step without running it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, Final

import torch
from torch import distributed, nn

from hybridremat.compiler.backend import Backend, CaptureComplete, CapturedGraph, GraphError
from hybridremat.compiler.capture_errors import as_capture_error, not_captured, own_words
from hybridremat.compiler.first_calls import set_up_first_call
from hybridremat.compiler.forgetting import compiled_for, nothing_forgotten
from hybridremat.compiler.opaque_calls import opaque_while_capturing
from hybridremat.compiler.sample_inputs import input_leaves
from hybridremat.errors import CaptureError, HybridRematError, InputError, ModelError
from hybridremat.graph.garbage import collected_seldom
from hybridremat.graph.private_dynamo import (
    is_switched_off,
    noting_code,
    usual_stance,
    without_marks,
)
from hybridremat.graph.private_torch import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    GuardOnDataDependentSymNode,
    LoggedByName,
    TorchDynamoException,
    TorchRuntimeError,
    any_torch_dispatch_mode_on_stack,
    dynamo_config,
    failures_unlogged,
)

SLOT: Final = "_compiled_call_impl"  # where nn.Module.compile puts a module's call; not copied or pickled

_LOG_METHODS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")


def _logging_methods() -> set[Callable[..., Any]]:
    """The methods that log: the standard ones, those that libraries add to ``Logger``, and warnings."""
    added = [m for n, m in vars(logging.Logger).items() if getattr(m, "__module__", "logging") != "logging"]
    standard = [getattr(logging.Logger, name) for name in _LOG_METHODS]
    return {method for method in (*standard, *added, warnings.warn) if callable(method)}


MOST_CAPTURES: Final = 256
"""Captures of one code object for one input shape, under different states of the model."""

MOST_GRAPHS: Final = 16384
"""Captures of one code object that many modules share, for all shapes; torch counts them together."""


@contextmanager
def dynamo_settings(*, dynamic: bool = False, whole: bool = False) -> Iterator[None]:
    """Dynamo's settings for planned steps.

    ``dynamic``: with symbols for sizes, and for nothing else. ``whole``: of one graph, which may call
    ``torch.autograd.grad`` then.
    """
    numbers: dict[str, Any] = {"specialize_float": True, "specialize_int": True} if dynamic else {}
    # of several graphs, no derivative goes through another one; with symbols, numbers are saved as tensors
    if whole and not dynamic and hasattr(dynamo_config, "trace_autograd_ops"):
        numbers["trace_autograd_ops"] = True
    if dynamic:  # what earlier captures have seen would make dimensions that are equal symbols of their own
        numbers["automatic_dynamic_shapes"] = False
    left_out = dynamo_config.ignore_logging_functions | _logging_methods()
    with (
        opaque_while_capturing(),
        dynamo_config.patch(
            ignore_logging_functions=LoggedByName(left_out),  # instead of a graph break
            enable_dynamo_decompositions=False,  # ``add_`` with ``alpha=`` as two kernels rounds twice
            # planned again if a hook is registered, or a parameter frozen (2.11 does not look by itself)
            skip_nnmodule_hook_guards=False,
            skip_tensor_guards_with_matching_dict_tags=False,
            use_numpy_random_stream=True,  # numpy's own numbers, in a graph break, and not PyTorch's
            optimize_ddp=False,  # DistributedDataParallel does not split the graph at gradient buckets
            fail_on_recompile_limit_hit=True,  # the step would then run unplanned
            recompile_limit=MOST_CAPTURES,
            accumulated_recompile_limit=MOST_GRAPHS,
            **numbers,
        ),
    ):
        yield


def fresh_call(model: nn.Module) -> Callable[..., Any]:
    """A function that runs the model, with a code object of its own.

    Dynamo keeps compiled code, and counts recompilations, by code object; ``Module._call_impl`` is one
    object for all models of the process.
    """

    def run_model(*args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    code = run_model.__code__.replace(co_name=f"run_{type(model).__name__}")
    fresh = FunctionType(code, run_model.__globals__, closure=run_model.__closure__)
    fresh.__kwdefaults__ = run_model.__kwdefaults__
    return fresh


@contextmanager
def training_mode(model: nn.Module) -> Iterator[None]:
    """Put the model in train mode; every submodule's flag is restored afterwards."""
    if model.training:
        yield
        return
    flags = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def model_device(model: nn.Module) -> str:
    """The kind of device that holds the model's first parameter."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


def compile_step(model: nn.Module, backend: Backend) -> Callable[..., Any]:
    """The model's call, compiled by ``backend``: one graph, or several if the backend takes several.

    If it is ``dynamic``, sizes of inputs are symbols, but those that are marked as static
    (:func:`~hybridremat.compiler.dynamic_inputs.sample_with_symbols`).

    Raises
    ------
    CaptureError
        If Dynamo is switched off.
    """
    if is_switched_off():
        raise CaptureError(
            "torch.compile is switched off (by TORCH_COMPILE_DISABLE=1, TORCHDYNAMO_DISABLE=1 or "
            "torch._dynamo.config.disable), and a step is captured with it: switch it on"
        )
    call = fresh_call(model)
    whole = not backend.several_graphs
    compiled = compiled_for(backend, call, dynamic=backend.dynamic, fullgraph=whole)
    return settled(compiled, symbols=backend.dynamic)


def settled(compiled: Callable[..., Any], *, symbols: bool = False) -> Callable[..., Any]:
    """The compiled call on inputs that have arrived: see ``private_collectives.arrived``.

    It runs as it was compiled, whatever ``torch.compiler.set_stance`` says. Marks of dynamic shapes, which
    other compiled code leaves on tensors that it takes or makes, are hidden; those of static ones, too,
    unless sizes are ``symbols``.

    Raises
    ------
    ModelError
        By the call, inside of a ``TorchDispatchMode``: PyTorch runs the plain code there, without a word.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        if any_torch_dispatch_mode_on_stack():
            raise ModelError(
                "a wrapped model was called, or is planned, inside of a TorchDispatchMode (FlopCounterMode, "
                "CommDebugMode, selective checkpointing), in which PyTorch runs nothing that is compiled. "
                "Leave that out, or call model.forward(…), which runs the plain model."
            )
        if distributed.is_available() and distributed.is_initialized():
            from hybridremat.graph.private_collectives import arrived

            args, kwargs = arrived((args, kwargs))
        with usual_stance(), without_marks(input_leaves((args, kwargs)), static=not symbols):
            return compiled(*args, **kwargs)

    return run


def capture(
    model: nn.Module,
    compiled: Callable[..., Any],
    backend: Backend,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> CapturedGraph | None:
    """Capture the graph of a step for these sample inputs; nothing is planned or run.

    None if the step has no graph.

    Raises
    ------
    CaptureError
        If the model breaks the graph.
    InputError
        If the inputs' shapes, dtypes or devices do not fit.
    """
    backend.armed, backend.latest = False, None
    try:
        run_once(model, compiled, backend, args, kwargs)
    except CaptureComplete:
        pass
    finally:
        backend.armed = True
    graph, backend.latest = backend.latest, None
    return graph


def attention_of(capability: int | None) -> AbstractContextManager[None]:
    """Where attention is captured as on a CUDA device of this compute capability; None: as here."""
    if capability is None:
        return nullcontext()
    from hybridremat.compiler.cuda_attention import cuda_attention

    return cuda_attention(capability)


def run_once(
    model: nn.Module,
    compiled: Callable[..., Any],
    backend: Backend,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call the compiled step for the first time, as in training, and return its output."""

    def call() -> Any:
        with training_mode(model), torch.enable_grad(), translated_errors(model, backend), collected_seldom():
            return compiled(*args, **kwargs)

    try:
        return call()
    except CaptureError as error:
        if error.__cause__ is None or not set_up_first_call(model, error.__cause__):
            raise
    return call()


def nothing_captured(model: nn.Module, units: tuple[str, ...] = (), why: str = "") -> CaptureError:
    """The error where Dynamo skips the forward, by default for a break; ``units`` can be captured."""
    loop = (
        "a graph break inside a loop (or a with or try statement) makes PyTorch give up on the function that "
        "holds it. Move the body of the loop into a submodule with a forward of its own, or the break out of "
        "the loop"
    )
    instead = f", or plan parts of it: hybridremat.wrap_each(model, {list(units)}, …)" if units else ""
    return CaptureError(
        f"nothing of {type(model).__name__}.forward could be captured: {why or loop}{instead}. The forward "
        "has been run on these inputs; parameters, gradients, buffers and random state are as they were.",
        units=units,
    )


def no_backward(model: nn.Module) -> CaptureError:
    """The error for a model without a captured backward graph."""
    return CaptureError(
        f"no backward graph was captured for {type(model).__name__}: none of its outputs depends on a "
        "trainable parameter, or on an input that requires a gradient, for these inputs"
    )


@contextmanager
def translated_errors(model: nn.Module, backend: Backend) -> Iterator[None]:
    """Raise Dynamo's errors as ours, and errors of planning as they are."""
    backend.error = None
    try:
        settings = dynamo_settings(dynamic=backend.dynamic, whole=not backend.several_graphs)
        noting, whole = noting_code(backend.note_code), whole_lookups(model)
        with nothing_forgotten(), settings, failures_unlogged(), noting, whole:
            yield
    except BackendCompilerFailed as error:
        inner = backend.error or error.inner_exception
        if isinstance(inner, HybridRematError):
            raise inner from None
        raise not_captured(model, inner) from error
    except GraphError as error:
        raise not_captured(model, error.__cause__ or error) from error.__cause__
    except TorchRuntimeError as error:
        own = _own_cause(error)
        if own is not None:
            raise own from None
        raise InputError(
            f"{type(model).__name__} fails on these inputs: {own_words(error)}. Check their shapes, "
            "dtypes and devices against what a training step passes."
        ) from error
    except GuardOnDataDependentSymNode as error:  # that Dynamo lets through as it is
        raise not_captured(model, error) from error
    except FailOnRecompileLimitHit as error:
        raise CaptureError(
            f"a part of {type(model).__name__} has been captured {MOST_CAPTURES} times for equal input "
            f"shapes, or {MOST_GRAPHS} times in all: something that its forward reads is new in each step. "
            "Often that is a Python number on a module (self.calls += 1): keep it in a buffer, or out of the "
            'forward. TORCH_LOGS="recompiles" names it.'
        ) from error
    except TorchDynamoException as error:  # a break, an unbacked size in a branch
        raise as_capture_error(model, error) from error
    finally:
        backend.error = None  # it holds what its calls held, and the backend is kept


@contextmanager
def whole_lookups(model: nn.Module) -> Iterator[None]:
    """Say so if a capture ends between a lookup in an embedding that is split by rows and its sum.

    Whatever ends it, no mask of a lookup is left (:mod:`hybridremat.compiler.masked_lookups`).
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        from hybridremat.compiler.masked_lookups import cut_lookup

        cut = cut_lookup(model, error)
        if cut is None or not isinstance(error, Exception) or _own_cause(error) is not None:
            raise
        raise cut from error


def _own_cause(error: BaseException | None) -> HybridRematError | None:
    """Our error that Dynamo met in a call of its graph, if there is one behind ``error``."""
    while error is not None and not isinstance(error, HybridRematError):
        error = error.__cause__ or error.__context__
    return error
