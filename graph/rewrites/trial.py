"""Try calls on the device: whether they give the bits of the plain ones, and what they allocate.

Random numbers of the same shapes, strides and types, drawn several times: the same bits and strides on these,
and the generator left in the same state, are strong evidence, not a proof.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import fx

from hybridremat.graph.costs.allocations import record
from hybridremat.graph.costs.index_ranges import index_ranges
from hybridremat.graph.costs.kernel_benchmarks import is_out_of_memory, memory_errors
from hybridremat.graph.costs.random_numbers import drawn, repeated
from hybridremat.graph.costs.recorder import Mark
from hybridremat.graph.costs.whole_numbers import whole_inputs
from hybridremat.graph.outside import outside_tracing
from hybridremat.graph.private_torch import possible
from hybridremat.graph.rewrites.rewrite import Form
from hybridremat.graph.tracing.fx_nodes import tensors
from hybridremat.graph.tracing.signature import fake_value

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Way:
    """A way to run a call, under the name by which its trial is kept.

    ``over``: the input whose tensor it writes its first result over. ``exact``: whether bits are compared.
    """

    name: str
    form: Form
    over: fx.Node | None = None
    exact: bool = True


@dataclass(frozen=True)
class Trial:
    """Ways to be tried on the inputs of a call; no form over an input if it has other bits without."""

    node: fx.Node
    ways: tuple[Way, ...]


class Inputs:
    """Random numbers for a node, and the calls on them."""

    def __init__(self, node: fx.Node, draw: int = 0) -> None:
        self._node, self._given = node, random_inputs(node, draw)

    def plain(self) -> Callable[[], Any]:
        """The node's own call."""
        args, kwargs = self._arguments(self._given)
        target: Any = self._node.target
        return partial(target, *args, **kwargs)

    def by(self, form: Form, over: fx.Node | None = None, *, copied: bool = True) -> Callable[[], Any]:
        """The call in another form, which may write over one of the inputs, or over a copy of it."""
        given = {**self._given, over: self._given[over].clone()} if over and copied else self._given
        args, kwargs = self._arguments(given)
        return partial(form.target, *args, **form.keywords(kwargs, given[over] if over else None))

    def _arguments(self, given: dict[fx.Node, Any]) -> tuple[Any, Any]:
        args, kwargs = fx.map_arg((self._node.args, dict(self._node.kwargs)), given.__getitem__)
        return args, kwargs


def tried(trials: Sequence[Trial], device: str, how: str) -> dict[str, tuple[int, int] | None]:
    """For each way, by its name, the peak bytes while it ran, and those alive when it returned.

    None where it does not leave what the plain call does. ``how``, for the log: "by parts", for example.

    Raises
    ------
    MeasurementError
        If no memory is left.
    """
    same: dict[str, bool] = {}

    def run(mark: Mark) -> None:
        for trial in trials:
            same.update(_compared(trial, device, how, mark))

    with outside_tracing(), memory_errors():
        segments = record(device, run).named()
    return {name: segments[name].above_start if passed else None for name, passed in same.items()}


def _compared(trial: Trial, device: str, how: str, mark: Mark) -> Iterator[tuple[str, bool]]:
    """Whether each way leaves what the plain call does; every call is a segment of its name."""
    inputs = expected = other_bits = None
    with refusals(trial.node, how):
        inputs = Inputs(trial.node)
        if any(way.exact for way in trial.ways):
            expected = _run(inputs.plain(), device, lambda: None)
    for way in trial.ways:
        if way.form is other_bits:
            continue
        same = False
        if inputs is not None and (expected is not None or not way.exact):
            with refusals(trial.node, how):
                if device == "cuda":  # a first call allocates what libraries keep, or try
                    inputs.by(way.form, way.over)()
                call = inputs.by(way.form, way.over, copied=way is not trial.ways[-1])
                mark(way.name)
                found = _run(call, device, partial(mark, ""))
                same = not way.exact or (same_bits(expected, found) and _same_again(trial.node, way, device))
            mark("")
        yield way.name, same
        if way.over is None and not same:
            other_bits = way.form


def _same_again(node: fx.Node, way: Way, device: str) -> bool:
    """Whether a way leaves what the plain call does on further numbers, too."""
    for draw in range(1, draws(node)):
        inputs = Inputs(node, draw)
        expected = _run(inputs.plain(), device, lambda: None)
        found = _run(inputs.by(way.form, way.over, copied=False), device, lambda: None)
        if not same_bits(expected, found):
            return False
    return True


_FEWEST: Final = 2  # each input is of like and of mixed magnitudes once
_TELLING: Final = 32  # a sum in another order comes out the same for two or three draws of ten
_WORK: Final = 1 << 22


def draws(*nodes: fx.Node) -> int:
    """How often calls are tried: until :data:`_TELLING` numbers of their smallest result have been compared.

    Where that would take more than some million elements of their results, as often as these last.
    """
    results = [tensor.numel() for node in nodes for tensor in tensors(fake_value(node)) if tensor.numel()]
    wanted = -(-_TELLING // min(results, default=_TELLING))
    return max(_FEWEST, min(wanted, _WORK // max(1, sum(results))))


@contextmanager
def refusals(node: fx.Node, how: str) -> Iterator[None]:
    """Tell of a kernel that does not take these sizes, whatever it raises; a lack of memory is raised."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        logger.warning("%s cannot be tried %s: %s", node, how, error)


def _run(call: Callable[[], Any], device: str, done: Callable[[], None]) -> tuple[Any, torch.Tensor]:
    """A call's results from a given seed, and the state of the generator; ``done`` is called between."""
    # torch.manual_seed seeds devices as well, which takes milliseconds where there are none
    generator = torch.cuda if device == "cuda" else torch.default_generator
    generator.manual_seed(0)
    results = call()
    done()
    return results, torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()


def same_bits(one: Any, other: Any) -> bool:
    """Whether two results, one tensor or several, have the same bits and layout."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_bits, one, other))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other or bool(one == other)
    layouts = ((each.dtype, each.shape, each.stride(), each.storage_offset()) for each in (one, other))
    return next(layouts) == next(layouts) and torch.equal(bits_of(one), bits_of(other))


def random_inputs(node: fx.Node, draw: int = 0) -> dict[fx.Node, Any]:
    """Random numbers for each input of a node; whole ones are such as it takes."""
    ranges, filled = index_ranges(node), whole_inputs(node)
    made = {
        source: random_like(fake_value(source), seed, min(2, ranges.get(source, 2)))
        for seed, source in enumerate(node.all_input_nodes, draw)
    }
    return {source: filled[source](each) if source in filled else each for source, each in made.items()}


def random_like(value: Any, seed: int, whole: int = 2) -> Any:
    """A tensor like the fake one: numbers of both signs, truths of both kinds, whole ones below ``whole``."""
    if not isinstance(value, torch.Tensor):
        return possible(value)
    extent = int(value.untyped_storage().nbytes()) // value.element_size()

    def draw(number: int) -> torch.Tensor:
        if value.dtype.is_floating_point or value.dtype.is_complex:
            dtype = value.dtype if value.element_size() > 1 else torch.float32  # nothing draws 8 bits
            return drawn(seed, dtype, value.device, normal=True)[:number].to(value.dtype, copy=True)
        source = torch.Generator(value.device).manual_seed(seed)
        numbers = torch.randint(0, max(1, whole), (number,), device=value.device, generator=source)
        return numbers.to(value.dtype)

    base = repeated(extent, draw)
    return torch.as_strided(base, value.shape, value.stride(), possible(value.storage_offset()))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements as whole numbers of their bits, in the order of its dimensions."""
    return tensor.contiguous().reshape(-1).view(_WHOLE.get(tensor.element_size(), torch.uint8))


_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the bytes of an element; compared as bytes they would take twice as long."""
