"""The public functions: wrap, prepare, unwrap, plan, get_plan, frontier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, overload

from torch import nn

from hybridremat.compiler.model_checks import require_matching_inputs
from hybridremat.errors import LimitError, ModelError
from hybridremat.planning.plan import Plan
from hybridremat.planning.settings import (
    FrontierSettings,
    PlanSettings,
    StepSettings,
    WrapSettings,
    settings_of,
)
from hybridremat.planning.step_costs import warn_beyond
from hybridremat.runtime.prepare import (
    make_planned_call,
    model_frontier,
    prepare_shape,
    require_planned_call,
)

if TYPE_CHECKING:
    from hybridremat.analysis.frontier import Frontier
    from hybridremat.reports.size_curve import SizeCurve

M = TypeVar("M", bound=nn.Module)


def wrap(
    model: M,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_limit: int | str | None = None,
    max_overhead: float | str | None = None,
    plan: Plan | str | Path | None = None,
    progress: bool = True,
    across_ranks: bool = True,
    **settings: Unpack[StepSettings],
) -> M:
    """Make a model's training step fit a memory limit, in place, and return the same object.

    Parameters
    ----------
    model
        Any module; it may be in eval mode, it is planned for training.
    args, kwargs
        Sample inputs: what one training step passes. Only shapes, dtypes and plain values matter; nothing is
        run on them, except that the forward runs on copies, and changes nothing, for a step of several graphs
        or with ``units``.
    memory_limit, max_overhead, on_infeasible
        **The goal.** ``memory_limit`` is the most step memory: bytes, ``"6GiB"``, or ``"50%"`` of the plain
        step's; on CUDA ``"auto"``, what the device has left now (:func:`hybridremat.auto_limit`), for all
        input shapes. Step memory is everything allocated on top of what is resident (parameters, buffers,
        optimizer state, inputs).

        ``max_overhead`` asks for the least memory within this much extra time (0.1 or ``"10%"``). Together
        with ``memory_limit``, both hold.

        ``on_infeasible``: what to do if no plan fits ``memory_limit``, now or for a later input shape:
        ``"error"``, or ``"least"``, the plan of least memory and a
        :class:`~hybridremat.InfeasibleLimitWarning`.
    reserve, hold_outputs, grad_outputs, outputs, forwards
        **What your own code does.** ``reserve`` bytes of the limit are kept free after the forward for what
        it allocates between forward and backward (a loss outside the model); :func:`hybridremat.measure`
        reports how much that is, as ``outside``.

        ``hold_outputs``: whether outputs other than the loss are held through the backward. By default they
        are assumed to be dropped, as in ``loss = model(**batch).loss``, and a warning is raised if they are
        not.

        ``grad_outputs``: which outputs may take part in the loss, ``"auto"`` (the scalars, if there are any;
        else all) or ``"all"``.

        ``outputs``: what the planned forward returns, ``"all"``, or ``"loss"``: None in place of tensors that
        carry a gradient and take no part in the loss (the logits of a language model), which then need not be
        kept to the end of the forward.

        ``forwards``: how many forwards may wait for their backward at one time (2 for a pair of inputs with
        one loss). The limit holds for all of them together; one more forward warns.
    policy
        **What must be saved or recomputed**, by module path and op:
        ``{"transformer.h.*.mlp.act": "must_recompute", "transformer.h.*:addmm": "must_save"}``. A pattern is
        ``MODULE`` or ``MODULE:OP``, both globs (``*`` matches dots too). A module includes all below it;
        ``*`` is the whole model. OP is matched against the short name that plans show (``addmm``, ``gelu``)
        and the full one (``aten.gelu.default``). The outputs of a ``must_save`` op are saved by the forward,
        and the op runs once; those of a ``must_recompute`` op are recomputed if the backward reads them.
    graph_breaks, units, max_plans, dynamic
        **Graphs and shapes.** ``graph_breaks``: what to do if the model's graph breaks: ``"plan"`` the graphs
        between the breaks together, or ``"error"``; ``"auto"`` plans them with a
        :class:`~hybridremat.GraphBreakWarning`, which names the line. To find them, the forward then runs
        on copies of the sample inputs, three times as a rule, without saving anything for a backward.

        ``units``: submodules that are planned each as a graph of its own (:func:`hybridremat.wrap_each`).
        ``fsdp``: over how many ranks ``fully_shard`` will split the units afterwards, or an
        :class:`hybridremat.Fsdp` with the dtypes of its policy; what it gathers and reduces is counted.

        ``max_plans``: the most input shapes whose plans are kept, and schedules whose graphs are, of a step
        that is captured for all sizes; the least recently used is dropped.

        ``dynamic``: whether input shapes that differ in sizes alone share one capture and its schedules.
        ``False``: each is captured and planned by itself. ``None``: the first is, and the second captures the
        step for all sizes of the dimensions that differ, if PyTorch can. ``True``: the first does so, for all
        sizes that it can, or a CaptureError says why it cannot. Compiled steps and several graphs are
        captured for each shape.
    gathers
        **Collectives.** ``"keep"``: each runs once. ``"plan"``: what is gathered from ranks in the graph
        (parameters in parts, activations along a sequence) may be dropped and gathered again in the
        backward. All ranks then run one plan, and have inputs of one shape at a time.
    compiler
        **What runs the step.** ``"eager"``: kernels op by op, with the same bits as plain PyTorch.
        ``"inductor"``: PyTorch's compiler fuses kernels; numbers are then as near to the plain ones as
        ``torch.compile``'s, and 100 % of a limit is the compiled plain step.
    rewrites
        **Ops in place and by parts.** ``"exact"``: an op may write its result over an input that nobody needs
        any more, or run by parts where a limit asks for it, where a trial on this device gave the same bits;
        op by op only, as Inductor has its own ways. ``"none"``: every op runs as PyTorch runs it.
        ``"chunked"``: these, and the loss of a language model is made by chunks of rows, with the product
        before it and their gradients, so that logits never exist whole. Not bit-equal: sums over rows are
        taken chunk by chunk. The loss alone may read the logits (``outputs="loss"``), and 100 % of a limit is
        the step that makes its loss so.
    gradients
        **When gradients leave.** ``"at_end"``: the backward returns them all, as in plain PyTorch.
        ``"in_backward"``: each goes to its parameter's ``.grad``, and to the hooks on the parameter, as soon
        as it is final and the parameter is read no more; the plan takes it to be dropped there
        (:func:`hybridremat.optimizer_in_backward`), or added to a ``.grad`` that exists. One forward for each
        backward, no clipping by global norm, no GradScaler, no DistributedDataParallel.
    strategy
        **Search strategy.** ``"hybrid"``: all that this tool knows. For comparison, on the same
        blocks: ``"plain"``, ``"sqrt"``, ``"every-block"``, ``"min-peak"``, ``"rotor"`` and ``"rockmate"``;
        on the whole graph at once: ``"checkmate"`` (up to some 100 to 150 ops, else a GraphSizeError),
        ``"checkmate-lp"`` and ``"layers-lp"``; with ``offload=`` what others move, ``"offload-all"`` and
        ``"offload-inputs"`` (:mod:`hybridremat.sequence.strategies`).
    block_solver
        **What solves blocks.** ``"auto"``: the exact program over sets of values where a block is small
        enough for it, else CP-SAT. ``"exact"``: that program alone, on chains of blocks that it can hold
        (else a GraphSizeError). ``"cp-sat"``: CP-SAT alone.
    planning_budget
        **How long the search may take**: ``"10s"``, ``"2min"``, or seconds, by the clock, from when the step
        is captured and its costs are known. The plan is the best found by then: its memory is exact and
        under the limit as ever, ``plan.optimality_gap`` says what is proven about its time, and another run
        may find another one. None: as far as a plan can win back in 1,000 steps what the search takes, or for
        about the time of the capture if that is more, counted in work, so that it is the same everywhere.
        ``"unlimited"``: until what the search can find has been searched.
    offload, host_memory_limit
        **Values that wait elsewhere.** ``"file:FOLDER"`` (models on the CPU) or ``"host"`` (on a GPU):
        between the forward and the backward values may wait in a file or in host memory, where that is
        faster than to compute them again; they are copied while the step runs. ``host_memory_limit``: the
        bytes that all of them may take (default: half of the memory installed). Op by op; each of several
        graphs moves its own values.
    untried
        **Kernels that cannot be tried alone.** What a kernel allocates while it runs is measured on inputs
        that are made up for it. If one takes none of these, ``"error"`` refuses the model, as no limit can be
        kept; ``"allow"`` plans without what it allocates, and the plan names it (``reserve=`` may keep room
        for it).
    cost_model, workers, cache, progress
        **How it is planned.** ``cost_model`` is the source of times: ``"profile"`` (measured here),
        ``"roofline"``, ``"flops"`` (the same everywhere). ``workers``: processes that solve blocks; None: one
        per core; the plan is the same for any number. ``cache``: whether plans and measured kernels are
        cached on disk (in the folder ``HYBRIDREMAT_CACHE``, with at most ``HYBRIDREMAT_CACHE_SIZE`` bytes of
        plans). ``progress``: whether to show how far planning is, as a bar on a terminal and as lines on
        the error stream elsewhere, and a line for each new input shape.
    plan
        **Instead of a limit**, a plan or its file (:meth:`hybridremat.Plan.save`). On the device that it was
        made on, it runs without being solved or timed again; elsewhere its memory is measured and compared
        with its limit. Its request holds for later input shapes, too.
    across_ranks
        **Several processes.** If a process group of ``torch.distributed`` is up, every rank has to call this
        (it is a collective of the default group): ranks with equal steps share one plan, made by the first of
        them, and an error on one rank is raised on all. False: this rank wraps alone. New input shapes in
        training, and :func:`prepare`, never wait for other ranks, but with ``gathers="plan"``.

    Returns
    -------
    nn.Module
        ``model`` itself. ``state_dict()``, parameter names, type, hooks and optimizers do not change. In eval
        mode or without gradients the plain model runs. Each input shape gets its own plan.

    Raises
    ------
    LimitError, InfeasibleLimitError, PolicyError, ModelError, InputError, CaptureError
        Before anything has changed.
    PlanFormatError, PlanMismatchError
        If ``plan`` is no plan, or was made for another model or input.
    RankError
        If another rank failed with an error that is not one of hybridremat's, or could not be reached.

    Examples
    --------
    >>> model = hybridremat.wrap(model, kwargs=batch, memory_limit="60%", cost_model="flops")
    >>> model(**batch).backward()
    >>> plan = hybridremat.get_plan(model)
    >>> plan.predicted_peak <= plan.memory_limit
    True
    """
    goal = {"memory_limit": memory_limit, "max_overhead": max_overhead}
    asked = settings_of("wrap", WrapSettings.__optional_keys__, goal | settings)
    make_planned_call(
        model, args, kwargs, asked, plan=plan, progress=progress, across_ranks=across_ranks
    ).install()
    return model


def wrap_each(
    model: M,
    units: str | Sequence[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    memory_limit: int | str | None = None,
    max_overhead: float | str | None = None,
    **settings: Any,
) -> M:
    """Plan submodules, and what runs between them, as graphs of their own under one limit for the whole step.

    Parameters
    ----------
    units
        Their names in ``model.named_modules()``, as globs (``"layers.*"``; ``*`` matches dots too). Modules
        inside of others that match are part of these. Each call of a unit is a graph of its own; units that
        are alike share capture and plan, so that planning does not take longer the more there are.
    model, args, kwargs, memory_limit, max_overhead, **settings
        As in :func:`wrap`. A limit is that of the whole step. What runs between the units is measured: the
        forward runs on copies of the sample inputs, and changes nothing.

    Returns
    -------
    nn.Module
        ``model`` itself.

    Raises
    ------
    LimitError
        If ``units`` names none.
    ModelError
        If a pattern matches no module, only modules inside of units, or a container that is never called.
    CaptureError
        If no unit is called in the forward, or one runs inside of ``torch.utils.checkpoint``.
    HybridRematError
        As :func:`wrap`.

    Examples
    --------
    >>> model = hybridremat.unwrap(model)
    >>> model = hybridremat.wrap_each(model, "layers.*", kwargs=batch, memory_limit="90%", cost_model="flops")
    """
    if not units:
        raise LimitError(f'units={units!r} name no modules; pass units="layers.*", for one, or call wrap')
    goal = {"memory_limit": memory_limit, "max_overhead": max_overhead, "units": units}
    return wrap(model, args, kwargs, **{**settings, **goal})


def unwrap(model: M) -> M:
    """Undo :func:`wrap` and return the same object.

    Raises
    ------
    ModelError
        If the model is not wrapped.
    """
    require_planned_call(model).remove()
    return model


@overload
def prepare(
    model: nn.Module, args: Sequence[Any] = ..., kwargs: Mapping[str, Any] | None = ..., *, sizes: None = ...
) -> Plan: ...


@overload
def prepare(
    model: nn.Module,
    args: Sequence[Any] = ...,
    kwargs: Mapping[str, Any] | None = ...,
    *,
    sizes: Sequence[Mapping[str, int]],
) -> SizeCurve: ...


def prepare(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    sizes: Sequence[Mapping[str, int]] | None = None,
) -> Plan | SizeCurve:
    """Plan a wrapped model for one more input shape, or many, before they come in training.

    Otherwise a shape is planned at its first step, and measuring its kernels then adds to that step's memory.

    Parameters
    ----------
    args, kwargs
        Sample inputs of that shape, used as in :func:`wrap`.
    sizes
        Sizes to be planned, by name (``[{"length": 128}, {"batch": 4, "length": 256}]``); others are those of
        the sample inputs, which are captured once for all of them. ``batch`` is the first dimension of an
        input, ``length`` the second of one with up to three, ``height`` and ``width`` the last of one with
        four; others are ``"NAME.DIMENSION"``. Dimensions that are equal in the sample inputs are one size.

    Returns
    -------
    Plan or SizeCurve
        The plan for the sample inputs; with ``sizes``, what the step needs at each of them.

    Raises
    ------
    ModelError
        If the model is not wrapped.
    LimitError
        If ``sizes`` are given, and each shape is to be captured by itself.
    InfeasibleLimitError, InputError, CaptureError
        As :func:`wrap`; existing plans are kept. With ``sizes``, those that fit are planned before an
        InfeasibleLimitError names the largest; InputError also for a size that is no input's.
    """
    call = require_planned_call(model)
    require_matching_inputs(model, args, {} if kwargs is None else kwargs)
    if sizes is not None:
        return call.curve(args, {} if kwargs is None else kwargs, sizes)
    return prepare_shape(call, args, {} if kwargs is None else kwargs)


def get_plan(model: nn.Module) -> Plan:
    """The plan that a wrapped model has run or made last (each input shape has one).

    Raises
    ------
    ModelError
        If the model is not wrapped, or is by a training loop's callback and has not run a step yet.
    """
    plan = require_planned_call(model).plan
    if plan is None:
        raise ModelError(
            f"this {type(model).__name__} has no plan yet: it is planned at its first training step; ask "
            "again after it"
        )
    return plan


def plan(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    progress: bool = True,
    certify: bool = False,
    **settings: Unpack[PlanSettings],
) -> Plan:
    """Plan without wrapping: parameters and errors as in :func:`wrap`; the model does not change.

    ``device_spec`` plans for a device that is not here: a name (``"h200"``), a JSON or TOML file with the
    fields of :class:`~hybridremat.DeviceSpec`, or such an object. Sizes and times are then computed, kernel
    workspaces are not counted, and the model may be on the ``meta`` device.

    ``certify``: whether to prove how good the plan is, too (:meth:`hybridremat.Plan.certified`); seconds.
    """
    asked = settings_of("plan", PlanSettings.__optional_keys__, settings)
    call = make_planned_call(model, args, kwargs, asked, progress=progress, build=False)
    made, spec = call.plan, call.context.settings.spec
    assert made is not None
    if spec is not None:
        warn_beyond(spec, made.memory_limit)
    return made.certified(progress=progress) if certify else made


def frontier(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    progress: bool = True,
    certify: bool = False,
    **settings: Unpack[FrontierSettings],
) -> Frontier:
    """The Pareto frontier of step memory and overhead, from one planning run.

    Parameters and errors as in :func:`plan`, without those that choose a point; the model does not change.
    ``dynamic=True``: one capture has those of all sizes (:meth:`hybridremat.Frontier.at_sizes`).
    ``certify``: whether to bound it from below as well (:meth:`hybridremat.Frontier.certified`).
    """
    asked = settings_of("frontier", FrontierSettings.__optional_keys__, settings)
    from hybridremat.analysis.frontier import frontier_of

    found = frontier_of(*model_frontier(model, args, kwargs, asked, progress=progress), show=progress)
    return found.certified(progress=progress) if certify else found
