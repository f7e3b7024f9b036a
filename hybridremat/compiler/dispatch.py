"""Several schedules of a step behind one function of autograd: each call runs one of them, by its sizes.

AOTAutograd is given the graphs of one. It takes from what the forward returns the outputs at the front, and
at the end so many numbers and so many buffers that it must not watch; whatever is between is saved. So
schedules may save as many tensors as they like, without padding. One more number says which of them ran, to
the backward of the same call, whatever has been called in between. A schedule is emitted when a call first
asks for it, and again if it has been let go since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from hybridremat.compiler.direct_calls import call_directly
from hybridremat.compiler.lifted import Lifted, twin
from hybridremat.compiler.output_hooks import sparing_saved
from hybridremat.graph.private_joint import Compiled
from hybridremat.graph.private_torch import boxed_nop, not_traced
from hybridremat.graph.sizes import Sizes


@dataclass(frozen=True)
class Emitted:
    """The graphs of one schedule, with symbols.

    ``overwritten`` are the places of the backward's inputs that it writes over.
    """

    lifted: Lifted
    overwritten: tuple[int, ...] = ()

    @cached_property
    def compiled(self) -> tuple[Compiled, Compiled]:
        """What runs the forward and the backward."""
        forward, backward = twin(self.lifted.forward), twin(self.lifted.backward)
        for module in (forward, backward):
            call_directly(module)
        run = sparing_saved(boxed_nop(backward, []), self.overwritten)
        return boxed_nop(forward, []), not_traced(run)


@dataclass
class Dispatch:
    """Runs the schedule that ``choose`` names for the sizes of a call.

    Attributes
    ----------
    inputs
        By the name of a symbol, the place of the input that it is.
    choose
        The number of the schedule for some sizes. Called once in each step, before anything of it runs; what
        it raises, the step raises.
    emitted
        The schedule of a number; what it computes and saves is the same for ever, as forwards may wait for
        their backwards.
    compiled
        Called when AOTAutograd has compiled the template; raises if that relies on what is not guarded.
    """

    inputs: Mapping[str, int]
    choose: Callable[[Sizes], int]
    emitted: Callable[[int], Emitted]
    compiled: Callable[[], None] = lambda: None
    _num_sizes: int = 0

    def template(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The two graphs that AOTAutograd is given: of the first schedule, with a number for which it is."""
        lifted = self.emitted(0).lifted
        self._num_sizes = lifted.num_sizes
        forward, backward = twin(lifted.forward), twin(lifted.backward)
        (output,) = forward.graph.find_nodes(op="output")
        output.args = ((*output.args[0], output.args[0][-1]),)
        output.meta.pop("desc", None)
        last = backward.graph.find_nodes(op="placeholder")[lifted.num_sizes - 1]
        with backward.graph.inserting_after(last):
            which = backward.graph.placeholder("hybridremat_schedule")
        which.meta = dict(last.meta)
        for module in (forward, backward):
            module.recompile()
        return forward, backward

    def forward(self, args: list[Any]) -> list[Any]:
        """Run the forward of the schedule for the sizes that are among its arguments."""
        sizes = {name: args[place] for name, place in self.inputs.items()}
        number = self.choose(sizes)
        outputs: Sequence[Any] = self.emitted(number).compiled[0](args)
        return [*outputs, number]

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Run the backward of the schedule that its forward has run."""
        number = args.pop(self._num_sizes)
        result: Sequence[Any] = self.emitted(number).compiled[1](args)
        return result
