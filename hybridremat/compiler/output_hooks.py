"""Outputs and their gradients: which take part in the loss, which are held, which gradients are undefined.

If an output is a scalar, the loss is inside the model: the scalars carry gradients, and all other outputs are
returned detached, so that no gradient of their size is ever made. A gradient for one of them raises
:class:`~hybridremat.errors.PlanMismatchError`, and holding one through the backward warns, as plans take them
to be dropped after the forward. What the model stores on itself (``self.last = x``) is an output too.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Protocol

import torch
from torch import fx

from hybridremat.compiler.deliveries import is_delivery
from hybridremat.errors import (
    DoubleBackwardError,
    HeldOutputWarning,
    ModelError,
    PlanMismatchError,
    warn_caller,
)
from hybridremat.graph.private_torch import (
    after_backward,
    graph_is_retained,
    is_traceable_wrapper_subclass,
    tangent_output,
    tree_leaves,
    tree_map,
)
from hybridremat.units import format_bytes


@dataclass(frozen=True)
class OutputRoles:
    """The indices of outputs that are returned detached, and whether the loss is one of the outputs."""

    detached: tuple[int, ...]
    loss_inside: bool


def _example(node: object) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def assign_roles(module: fx.GraphModule, *, all_outputs: bool, loss_only: bool = False) -> OutputRoles:
    """Detach the outputs of Dynamo's graph that take no part in the loss, or with ``loss_only`` drop them.

    Raises
    ------
    ModelError
        If only the loss is to be returned, and there is none.
    """
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(output.args[0])
    examples = [_example(node) for node in results]
    differentiable = [i for i, e in enumerate(examples) if e is not None and e.requires_grad]
    scalars = [i for i in differentiable if (e := examples[i]) is not None and e.dim() == 0]
    if loss_only and not scalars:
        raise _no_loss()
    if all_outputs or not scalars:
        return OutputRoles((), loss_inside=False)
    detached = tuple(i for i in differentiable if i not in scalars)
    if loss_only:
        output.args = (tuple(None if i in detached else item for i, item in enumerate(results)),)
        module.recompile()  # what only they need is dead, and goes when the graph has become functional
        return OutputRoles((), loss_inside=True)
    detach_outputs(module, detached)
    return OutputRoles(detached, loss_inside=True)


class OutputSettings(Protocol):
    """What is said of a step's outputs (:class:`~hybridremat.plans.request.Request`)."""

    @property
    def grad_outputs(self) -> str:
        """``"all"`` if gradients may flow from all of them."""
        ...

    @property
    def hold_outputs(self) -> bool:
        """Whether outputs other than losses are held through the backward."""
        ...

    @property
    def outputs(self) -> str:
        """``"loss"`` if None is returned for all tensors but losses."""
        ...


def returned_outputs(outputs: Any, settings: OutputSettings) -> Any:
    """What a step of several graphs returns: as of one graph, gradients flow from losses if there are any.

    Raises
    ------
    ModelError
        If only losses are to be returned, and there is none.
    """
    loss_only = settings.outputs == "loss"
    if not _has_losses(outputs, settings):
        if loss_only:
            raise _no_loss()
        return outputs
    numbers = count()

    def returned(value: object) -> object:
        number = next(numbers)
        if not isinstance(value, torch.Tensor) or _is_loss(value):
            return value
        if loss_only:
            return None
        return refusing_gradients(value, _refused(number)) if value.requires_grad else value

    return tree_map(returned, outputs)


def outputs_in_backward(outputs: Any, settings: OutputSettings) -> list[torch.Tensor]:
    """The tensors of an output that the caller holds in the backward: losses alone, if there are any.

    ``hold_outputs`` and ``grad_outputs`` may say otherwise.
    """
    tensors = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
    dropped = _has_losses(outputs, settings) and not settings.hold_outputs
    return [each for each in tensors if not dropped or _is_loss(each)]


def losses_among(outputs: Any, settings: OutputSettings) -> list[torch.Tensor]:
    """The losses among outputs, if gradients flow from these alone."""
    return list(filter(_is_loss, tree_leaves(outputs))) if _has_losses(outputs, settings) else []


def _has_losses(outputs: Any, settings: OutputSettings) -> bool:
    return settings.grad_outputs != "all" and any(map(_is_loss, tree_leaves(outputs)))


def detach_outputs(module: fx.GraphModule, places: Iterable[int]) -> None:
    """Return some outputs of Dynamo's graph detached."""
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(output.args[0])
    for place in places:
        with module.graph.inserting_before(output):
            results[place] = module.graph.call_method("detach", (results[place],))
    output.args = (tuple(results),)
    module.recompile()


def with_unread(outputs: Sequence[Any], places: Collection[int], inputs: Sequence[Any]) -> Sequence[Any]:
    """Outputs of a graph, of which those that are unread raise when a gradient reaches them."""
    results = list(outputs)
    read = [each for each in outputs if _has_history(each)][:1]
    links = read or [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    for place in places:
        results[place] = refusing_gradients(results[place], _UNREAD, links)
    return type(outputs)(results) if isinstance(outputs, tuple) else results


class _Refusing(torch.autograd.Function):
    """An output for which no gradient is planned: its backward raises.

    It is no leaf, and leads to what the planned backward leads to: autograd leaves out what does not lead to
    gradients that are asked for by name (``backward(inputs=…)``, ``torch.autograd.grad``), hooks included.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, message: str, *_links: torch.Tensor) -> torch.Tensor:
        """The output's memory: no view, so that it may be changed in place."""
        ctx.message = message
        ctx.set_materialize_grads(False)
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Refuse a gradient; DistributedDataParallel's node between output and loss passes None."""
        if gradients[0] is not None:
            raise PlanMismatchError(ctx.message.format(tuple(gradients[0].shape)))
        return (None,) * len(ctx.needs_input_grad)


def refusing_gradients(
    output: torch.Tensor, message: str, links: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """An output that raises when a gradient reaches it, whatever gradients that backward asks for.

    ``message`` has braces for the gradient's shape. ``links``: tensors that lead to all that the output
    depends on, if it has no history of its own.
    """
    refusing: torch.Tensor = _Refusing.apply(output, message, *links)  # type: ignore[no-untyped-call]
    return refusing


def _is_loss(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.dim() == 0


def _no_loss() -> ModelError:
    return ModelError(
        'outputs="loss" returns the loss alone, and no output of this model is a scalar with a gradient. '
        "Give it its labels, so that it computes the loss, or leave outputs= out."
    )


class HeldOutputs:
    """Warns of outputs of one compiled graph that are held through its backward.

    ``expected``: the plan counts them as held, so there is no warning.
    """

    def __init__(self, *, expected: bool) -> None:
        self._warned = expected
        self._alive: list[weakref.ref[torch.Tensor]] = []
        self._made: frozenset[int] | None = None  # the outputs that share no memory with an input

    def guard(
        self,
        outputs: Sequence[Any],
        detached: Sequence[int],
        inputs: Sequence[object],
        leaving: Sequence[torch.Tensor],
    ) -> Sequence[Any]:
        """Make gradients of detached outputs raise, and follow the outputs other than scalars.

        ``leaving``: parameters that nothing else leads to, as their gradients leave early.
        """
        results = list(outputs)
        links = [*[*filter(_has_history, outputs)][:1], *leaving] if detached else []
        for index in detached:
            results[index] = refusing_gradients(results[index], _refused(index), links)
        if not self._warned:
            self._follow(results, inputs)
        return type(outputs)(results) if isinstance(outputs, tuple) else results

    def watch(self, outputs: Any, inputs: Iterable[object], settings: OutputSettings) -> None:
        """Follow what a step of several graphs returns, other than scalars, if gradients flow from losses."""
        if self._warned or not _has_losses(outputs, settings):
            return
        found = [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]
        given = {_address(value) for value in inputs if isinstance(value, torch.Tensor)}
        self._alive = [weakref.ref(each) for each in found if each.dim() and _address(each) not in given]
        for loss in filter(_is_loss, found):
            loss.register_hook(lambda _: self.at_backward())

    def _follow(self, outputs: Sequence[Any], inputs: Sequence[object]) -> None:
        if self._made is None:  # the same in every step: one graph makes them
            given = {_address(value) for value in inputs if isinstance(value, torch.Tensor)}
            every = {i: o for i, o in enumerate(outputs) if isinstance(o, torch.Tensor) and o.dim()}
            self._made = frozenset(i for i, output in every.items() if _address(output) not in given)
        self._alive = [weakref.ref(outputs[index]) for index in self._made]

    def at_backward(self) -> None:
        """Warn, once, if an output is still alive when the backward that starts now has ended.

        The backward itself holds outputs that it reads, and where the graph is retained, it keeps them.
        """
        if self._alive and not self._warned and not graph_is_retained():
            after_backward(self._warn_if_held)

    def _warn_if_held(self) -> None:
        held = [tensor for ref in self._alive if (tensor := ref()) is not None]
        self._alive = []
        size = sum({_address(tensor): _bytes(tensor) for tensor in held}.values())
        if self._warned or size == 0:
            return
        self._warned = True
        warn_caller(
            f"{format_bytes(size)} of model outputs that are not part of the loss are still held during the "
            "backward, beyond what the plan counts. Drop them (loss = model(**batch).loss; what the model "
            "stores on itself counts too), or wrap with hold_outputs=True to have them counted.",
            HeldOutputWarning,
        )


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if _has_memory(tensor) else 0


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if _has_memory(tensor) else id(tensor)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor has one storage of its own: quantized weights and DTensors are made of others."""
    return tensor.layout == torch.strided and not is_traceable_wrapper_subclass(tensor)


def _has_history(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _refused(index: int) -> str:
    """Why output ``index`` of a model takes no gradient."""
    return (
        f"a gradient reached output {index} of the model, of shape {{}}. The step was planned for a "
        "loss inside the model (one of its outputs is a scalar), with no gradient for the other outputs. "
        'Wrap with grad_outputs="all" to let every output take part in the loss.'
    )


_UNREAD = (
    "a gradient of shape {} reached an output of a graph that was planned without: on the sample inputs the "
    "model returned it beside a loss that was not made of it. Wrap with "
    'grad_outputs="all", which plans gradients for all outputs.'
)


_INSTEAD = (
    "Nothing of the planned backward has run. Call model.forward(…) instead of model(…) in such a step, "
    "which runs the plain model."
)


class UndefinedGradients:
    """Leaves gradients of one compiled graph undefined that come from undefined gradients of its outputs.

    AOTAutograd passes zeros for these to the backward; plain autograd passes None on.

    Attributes
    ----------
    once
        Whether the backward may write over what is saved, so that it cannot run again.
    """

    def __init__(self) -> None:
        self.once = False
        self._here = threading.local()  # the engine has a thread for each device

    def register(self, outputs: Iterable[object]) -> None:
        """Note, at the next backward through these outputs, which of them have no gradient."""
        for index, output in enumerate(outputs):
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                output.register_hook(partial(self._note, index))

    def _note(self, index: int, gradient: torch.Tensor | None) -> None:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "a backward with create_graph=True reached a planned step: it asks for the gradient of a "
                f"gradient, and a plan covers one backward. {_INSTEAD}"
            )
        if self.once and graph_is_retained():
            raise DoubleBackwardError(
                "a backward with retain_graph=True reached a compiled step, whose backward writes over what "
                f"is saved, so that it can run only once. {_INSTEAD} Or set "
                "torch._functorch.config.donated_buffer = False before hybridremat.wrap: plans are then made "
                "for a backward that leaves what is saved as it is, and takes more memory."
            )
        missing = self._missing()
        if gradient is None:
            missing.add(index)
        else:
            missing.discard(index)

    def _missing(self) -> set[int]:
        if not hasattr(self._here, "missing"):
            self._here.missing = set()
        missing: set[int] = self._here.missing
        return missing

    def unreached(self, sources: Mapping[int, frozenset[int | None]]) -> frozenset[int]:
        """Those of some gradients that come from undefined ones alone; ``sources`` as below."""
        missing = self._missing()
        return frozenset(index for index, found in sources.items() if found and found <= missing)

    def drop_unreached(
        self, sources: Sequence[frozenset[int | None]], run: Callable[[list[Any]], Sequence[Any]]
    ) -> Callable[[list[Any]], Sequence[Any]]:
        """``run``, a backward, with None for gradients that come from undefined ones alone.

        ``sources`` are its :func:`gradient_sources`. Both functions take their arguments boxed.
        """

        def call(args: list[Any]) -> Sequence[Any]:
            gradients, missing = run(args), self._missing()
            if not missing:
                return gradients
            pairs = zip(gradients, sources, strict=True)
            return [None if source and source <= missing else gradient for gradient, source in pairs]

        call._boxed_call = True  # type: ignore[attr-defined]
        return call


def sparing_saved(
    run: Callable[[list[Any]], Sequence[Any]], overwritten: Sequence[int]
) -> Callable[[list[Any]], Sequence[Any]]:
    """``run``, a backward that writes over some of what is saved, on copies if the graph is retained.

    A second backward then finds what was saved. Both functions take their arguments boxed.
    """
    if not overwritten:
        return run

    def call(args: list[Any]) -> Sequence[Any]:
        if graph_is_retained():
            for place in overwritten:
                args[place] = args[place].clone()
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def gradient_sources(backward: fx.Graph) -> list[frozenset[int | None]]:
    """For each result of a backward graph: the model's outputs whose gradients it depends on.

    None stands for a tangent that belongs to no single output (a base that several outputs are views of).
    """
    found = _sources(backward)
    output = next(iter(backward.find_nodes(op="output")))
    return [found[item] if isinstance(item, fx.Node) else frozenset() for item in output.args[0]]


def delivered_sources(backward: fx.Graph) -> dict[int, frozenset[int | None]]:
    """:func:`gradient_sources` of the gradients that a backward graph delivers, by input."""
    found = _sources(backward)
    calls = (node for node in backward.nodes if is_delivery(node))
    return {node.args[-1]: found[node.args[0]] for node in calls}


def _sources(backward: fx.Graph) -> dict[fx.Node, frozenset[int | None]]:
    found: dict[fx.Node, frozenset[int | None]] = {}
    for node in backward.nodes:
        sources = frozenset[int | None]().union(*(found[source] for source in node.all_input_nodes))
        if node.op == "placeholder" and node.name.startswith("tangents_"):
            sources = frozenset([tangent_output(node)])
        found[node] = sources
    return found
