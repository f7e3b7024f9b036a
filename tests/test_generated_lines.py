"""The lines of the code that Inductor generates: each class of them is known, or the step is refused."""

from dataclasses import dataclass

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._inductor.codegen import cpp_wrapper_cpu, cpp_wrapper_gpu, memory_planning, wrapper
from torch._inductor.utils import IndentedBuffer

import hybridremat
from hybridremat.graph.private_inductor_code import _READERS, code_of
from hybridremat.graph.private_inductor_lines import ABSTRACT, HIDING, NEUTRAL
from support.compiled import compiled, needs_compiler, nothing_kept_by_inductor
from support.training import allocated_peak, small
from support.wrapping import HOW, assert_untouched, state_of

LIBRARY = cpp_wrapper_cpu, cpp_wrapper_gpu, memory_planning, wrapper


@pytest.fixture(autouse=True)
def _nothing_kept():
    with nothing_kept_by_inductor():
        yield


def line_classes(base=wrapper.WrapperLine):
    for derived in base.__subclasses__():
        if derived.__module__.startswith("torch."):
            yield derived.__name__
        yield from line_classes(derived)


def test_every_class_of_lines_is_in_one_list():
    installed = {*line_classes(), "WrapperLine"}
    assert len(installed) > 20
    lists = [set(_READERS), set(NEUTRAL), set(HIDING), ABSTRACT]
    assert installed <= set().union(*lists)
    assert sum(map(len, lists)) == len(set().union(*lists))


def test_the_lists_hold_every_class_that_inductor_defines_as_a_line():
    """Those too that are no ``WrapperLine``, should a release change the base."""
    named = {n for module in LIBRARY for n, found in vars(module).items() if _is_line(module, n, found)}
    others = {"HasWriteLine", "_LazyTritonCompileKickoffLine"}  # a protocol, and code as text
    assert named - others <= {*_READERS, *NEUTRAL, *HIDING, *ABSTRACT}


def _is_line(module, name, found):
    return name.endswith("Line") and isinstance(found, type) and found.__module__ == module.__name__


class Code:
    """What ``code_of`` reads of Inductor's ``GraphLowering``."""

    graph_outputs = ()

    def __init__(self, *lines, subgraph=""):
        self.wrapper_code, self.lines, self.subgraph_definitions = self, list(lines), IndentedBuffer()
        if subgraph:
            self.subgraph_definitions.writeline(subgraph)


class NewLine(wrapper.WrapperLine):
    """As a next release may have."""


class NewAllocateLine(wrapper.AllocateLine):
    """Derived from what is known, and so not the same."""


def made(kind):
    return object.__new__(kind)


def test_text_and_neutral_lines_say_nothing_of_memory():
    lines = "buf0 = 1", wrapper.CommentLine("# a"), wrapper.NullLine(None), wrapper.LineContext(None)
    assert code_of(Code(*lines)).events == ()


@pytest.mark.parametrize("kind", [NewLine, NewAllocateLine])
def test_a_class_that_is_not_known_is_refused(kind):
    with pytest.raises(hybridremat.GeneratedCodeError) as raised:
        code_of(Code("buf0 = 1", made(kind)))
    said = str(raised.value)
    assert kind.__name__ in said
    assert torch.__version__ in said
    assert 'compiler="eager"' in said


def test_what_is_no_line_at_all_is_refused():
    with pytest.raises(hybridremat.GeneratedCodeError, match="a dict"):
        code_of(Code({}))


def test_lines_that_hide_memory_are_refused():
    with pytest.raises(hybridremat.GeneratedCodeError, match="a graph inside the graph"):
        code_of(Code(made(wrapper.EnterSubgraphLine)))
    with pytest.raises(hybridremat.GeneratedCodeError, match="holds several"):
        code_of(Code(made(memory_planning.AllocFromPoolLine)))
    with pytest.raises(hybridremat.GeneratedCodeError, match="whose memory has no lines"):
        code_of(Code(subgraph="def partition_0(args):"))


def with_new_line(monkeypatch):
    """Let Inductor write a line of a class that is not known into each graph."""
    plain = wrapper.PythonWrapperCodegen.generate

    def generate(self, is_inference):
        self.lines.append(Silent())
        return plain(self, is_inference)

    monkeypatch.setattr(wrapper.PythonWrapperCodegen, "generate", generate)


@dataclass
class Silent(wrapper.WrapperLine):
    def codegen(self, code):
        code.writeline("pass")


def test_a_plan_for_such_code_is_refused(monkeypatch):
    model, batch = small("mlp")
    before = state_of(model)
    with_new_line(monkeypatch)
    with pytest.raises(hybridremat.GeneratedCodeError, match="a Silent"):
        hybridremat.wrap(model, kwargs=batch, memory_limit="90%", compiler="inductor", **HOW)
    assert_untouched(before, model)


@pytest.mark.slow
@needs_compiler
def test_code_that_is_built_is_refused_too(monkeypatch):
    """A plan from a file is not lowered again before it is compiled."""
    model, batch = small("mlp")
    plan = hybridremat.plan(model, kwargs=batch, memory_limit="90%", compiler="inductor", **HOW)
    before = state_of(model)
    with_new_line(monkeypatch)
    with pytest.raises(hybridremat.GeneratedCodeError, match="a Silent"):
        hybridremat.wrap(model, kwargs=batch, plan=plan, progress=False)
    assert_untouched(before, model)


# --- kernels of libraries that write into buffers with lines of their own

LIB = torch.library.Library("hybridremat_lines", "FRAGMENT")
WORK = 1 << 18  # numbers that the kernel allocates while it runs


def _register():
    tags = [torch.Tag.pt2_compliant_tag]
    LIB.define("halves(Tensor x) -> (Tensor, Tensor)", tags=tags)
    LIB.define(
        "halves.out(Tensor x, *, Tensor(a!) low, Tensor(b!) high) -> (Tensor(a!), Tensor(b!))",
        tags=[*tags, torch.Tag.out] if hasattr(torch.Tag, "out") else tags,
    )

    def halves(x):
        work = torch.empty(WORK, dtype=x.dtype)
        return x * 0.5 + 0 * work.fill_(1)[0], x * 2

    def halves_out(x, *, low, high):
        work = torch.empty(WORK, dtype=x.dtype)
        torch.mul(x, 0.5 + 0 * float(work.fill_(1)[0]), out=low)
        torch.mul(x, 2, out=high)
        return low, high

    LIB.impl("halves", halves, "CPU")
    LIB.impl("halves.out", halves_out, "CPU")
    LIB.impl("halves", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
    LIB.impl("halves.out", lambda x, *, low, high: (low, high), "Meta")

    def backward(ctx, low, high):
        return low * 0.5 + high * 2

    torch.library.register_autograd("hybridremat_lines::halves", backward, lib=LIB)


_register()


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        low, high = torch.ops.hybridremat_lines.halves(self.first(x))
        return self.last(torch.tanh(low) * torch.sin(high)).square().mean()


class Put(nn.Module):
    """Rows at indices: index_put or scatter, which Inductor leaves to the library for these."""

    def __init__(self, put):
        super().__init__()
        self.first, self.last, self.put = nn.Linear(64, 64), nn.Linear(64, 64), put

    def forward(self, x, at):
        hidden = self.first(x)
        return self.last(torch.tanh(self.put(hidden.new_zeros(256, 64), at, hidden))).square().mean()


def halves():
    return Halves(), {"x": torch.randn(512, 64)}


def index_put():
    def put(zeros, at, rows):
        counts = torch.index_put(zeros[:, 0].long(), (at,), torch.ones_like(at), accumulate=True)
        return rows * counts[at].unsqueeze(1)

    return Put(put), {"x": torch.randn(512, 64), "at": torch.randint(256, (512,))}


def scatter():
    model = Put(lambda zeros, at, rows: torch.scatter_reduce(zeros, 0, at, rows, "amax"))
    return model, {"x": torch.randn(512, 64), "at": torch.randint(256, (512, 64))}


def lines_read(monkeypatch):
    """The classes of lines that have been read since."""
    read = set()

    def noting(name, reader):
        return lambda lowering, line: read.add(name) or reader(lowering, line)

    for name, reader in _READERS.items():
        monkeypatch.setitem(_READERS, name, noting(name, reader))
    return read


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (halves, "ExternKernelMultiOutLine"),
        (index_put, "IndexPutFallbackLine"),
        (scatter, "ScatterFallbackLine"),
    ],
)
def test_what_such_kernels_take_is_counted(make, kind, monkeypatch):
    read = lines_read(monkeypatch)
    model, batch = make()
    planned = compiled(model, batch, "100%")
    assert kind in read or not hasattr(wrapper, kind)  # the first is new in 2.13

    def step():
        planned(**batch).backward()

    step()
    planned.zero_grad()  # outside: frees of what was there before may be counted or not
    assert allocated_peak(step) == hybridremat.get_plan(planned).predicted_peak
