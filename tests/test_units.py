"""Units: submodules that are planned, in a model that runs as it is."""

from __future__ import annotations

import copy
import random
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import hybridremat
from hybridremat.compiler.units import find_units
from hybridremat.errors import CaptureError, LimitError, ModelError
from hybridremat.graph.private_torch import input_gradients
from hybridremat.graph.tracing.trace import gradient_bytes_at
from hybridremat.sequence.joined_graphs import VARIANTS
from support.compiled import needs_compiler
from support.training import allocated_peak, traced, train
from support.wrapping import HOW, assert_untouched, state_of


class Layer(nn.Module):
    def __init__(self, width=16, wide=4):
        super().__init__()
        self.up, self.down = nn.Linear(width, wide * width), nn.Linear(wide * width, width)
        self.norm, self.dropout = nn.BatchNorm1d(width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    """Layers of two kinds, with what PyTorch cannot capture between them."""

    def __init__(self, depth=4, around=None):
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.layers = nn.ModuleList(Layer(wide=4 if n % 2 else 6) for n in range(depth))
        self.head = nn.Linear(16, 8)
        self.around = around

    def forward(self, x, labels):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x) if self.around is None else self.around(layer, x)
            float(x.detach().sum())
        return functional.cross_entropy(self.head(x), labels)


def batch(rows=96):
    return {"x": torch.randn(rows, 16), "labels": torch.randint(0, 8, (rows,))}


def each(model, given, limit="60%", units="layers.*", **how):
    return hybridremat.wrap_each(model, units, kwargs=given, memory_limit=limit, **HOW, **how)


HOWS = [{}, {"gradients": "in_backward"}, {"forwards": 2}, {"rewrites": "none"}, {"max_overhead": 0.5}]


@pytest.mark.everyday
@pytest.mark.parametrize("how", HOWS, ids=str)
def test_units_train_as_the_plain_model_does_under_the_limit(how):
    torch.manual_seed(0)
    model, given = Tower(), batch()
    plain, before = copy.deepcopy(model), state_of(model.layers)
    each(model, given, limit="70%" if "forwards" not in how else "90%", **how)
    assert_untouched(before, model.layers)
    plan = hybridremat.get_plan(model)
    assert len({part.fingerprint for part in plan.parts}) == 2
    assert len(set(plan.places)) == len(plan.parts) and len(plan.places) == 4
    expected, found = train(plain, given), train(model, given)
    assert expected.differences(found) == []
    if how.get("gradients") != "in_backward":  # gradients stay in .grad here
        assert max(found.peaks) <= plan.predicted_peak <= plan.memory_limit < plan.plain_peak
    model.eval(), plain.eval()
    assert torch.equal(model(**given), plain(**given))
    assert all(layer._compiled_call_impl is None for layer in model.layers)


class Alike(Tower):
    def __init__(self, depth):
        super().__init__(0)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))


@pytest.mark.full_effort
def test_alike_layers_share_plans_whatever_their_number():
    torch.manual_seed(0)
    plans = {}
    for depth in (2, 12):
        model, given = Alike(depth), batch()
        plans[depth] = hybridremat.get_plan(each(model, given))
        assert len(plans[depth].parts) <= VARIANTS
        assert hybridremat.get_plan(model).predicted_peak >= hybridremat.measure(model, kwargs=given).peak
    assert plans[12].parts[0].fingerprint == plans[2].parts[0].fingerprint
    assert plans[12].plain_peak > 4 * plans[2].plain_peak


COMPILED = pytest.param("inductor", "95%", marks=[pytest.mark.slow, needs_compiler])


@pytest.mark.parametrize(("compiler", "limit"), [("eager", "62%"), COMPILED])
def test_alike_layers_run_in_several_ways(compiler, limit, tmp_path):
    """Three of six save what the others recompute, and a plan file says which."""
    torch.manual_seed(0)
    model, given = Alike(6), batch()
    again, plain = copy.deepcopy(model), copy.deepcopy(model)
    how = {"compiler": compiler, "rewrites": "none"}
    made = hybridremat.get_plan(each(model, given, limit=limit, **how))
    assert 1 < len(made.parts) <= VARIANTS and len({part.fingerprint for part in made.parts}) == 1
    assert len({part.schedule for part in made.parts}) == len(made.parts)
    together = 6 * min(part.overhead for part in made.parts), 6 * max(part.overhead for part in made.parts)
    assert together[0] < sum(made.parts[place].overhead for place in made.places) < together[1]
    made.save(tmp_path / "plan.json")
    hybridremat.wrap(again, kwargs=given, plan=tmp_path / "plan.json", progress=False)
    ways = [[each.parts[n].schedule for n in each.places] for each in (made, hybridremat.get_plan(again))]
    assert ways[0] == ways[1]
    found = train(model, given)
    assert found.differences(train(again, given)) == []
    assert max(found.peaks) <= made.predicted_peak <= made.memory_limit
    torch._dynamo.reset()  # graphs are captured again, and run as planned
    more = train(model, given)
    assert max(more.peaks[1:]) <= made.predicted_peak
    assert train(again, given).differences(more) == []
    if compiler == "eager":
        assert train(plain, given).differences(found) == []


def test_a_plan_and_a_frontier_are_those_of_wrap(tmp_path):
    torch.manual_seed(0)
    model, given = Tower(2), batch()
    found = hybridremat.frontier(model, kwargs=given, units="layers.*", **HOW)
    middle = found.points[len(found.points) // 2]
    plan = hybridremat.plan(model, kwargs=given, memory_limit=middle.peak, units=("layers.*",), **HOW)
    assert (plan.predicted_peak, plan.overhead) == (middle.peak, middle.overhead)
    assert plan.request.units == ("layers.*",)
    plan.save(tmp_path / "plan.json")
    plain = copy.deepcopy(model)
    hybridremat.wrap(model, kwargs=given, plan=tmp_path / "plan.json", progress=False)
    followed = hybridremat.get_plan(model)
    assert [each.schedule for each in followed.parts] == [each.schedule for each in plan.parts]
    assert train(plain, given).differences(train(model, given)) == []


class Twice(Tower):
    """One layer is called twice, with other shapes; another is called under no_grad, and one not at all."""

    def forward(self, x, labels):
        first, frozen, _, last = self.layers
        x = first(self.embed(x))
        with torch.no_grad():
            shift = frozen(x)
        x = x + first(x[: len(x) // 2]).mean(0) + shift
        return functional.cross_entropy(self.head(last(x=x)), labels)


def test_a_unit_may_run_twice_with_other_shapes_without_gradients_or_not_at_all(caplog):
    torch.manual_seed(0)
    model, given = Twice(), batch()
    plain = copy.deepcopy(model)
    with caplog.at_level("INFO", "hybridremat"):
        each(model, given, limit="80%")
    assert "1 units of Twice have not run: layers.2" in caplog.text
    found = train(model, given)
    assert train(plain, given).differences(found) == []
    assert max(found.peaks) <= hybridremat.get_plan(model).predicted_peak


def test_a_unit_that_shares_a_parameter_with_another_and_is_changed_outside():
    class Shared(Tower):
        def __init__(self):
            super().__init__(2)
            self.layers[1].up = nn.Linear(16, 96)
            self.layers[0].up.weight = self.layers[1].up.weight

        def forward(self, x, labels):
            x = self.layers[0](self.embed(x))
            x = self.layers[1](x.clone().mul_(2))
            return functional.cross_entropy(self.head(x.add_(1)), labels)

    torch.manual_seed(0)
    model, given = Shared(), batch()
    model.layers[1].down = nn.Linear(96, 16)
    plain = copy.deepcopy(model)
    for how in ({}, {"gradients": "in_backward"}):
        made = each(copy.deepcopy(model), given, limit="90%", **how)
        assert train(copy.deepcopy(plain), given).differences(train(made, given)) == []


class Cache:
    """As generation passes from layer to layer."""

    def __init__(self):
        self.items = []


class Caching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x, cache):
        x = self.layer(x)
        cache.items.append(x * 2)
        return x, cache


def test_a_unit_may_take_change_and_return_an_object():
    class Caches(Tower):
        def __init__(self):
            super().__init__(0)
            self.layers = nn.ModuleList(Caching() for _ in range(3))

        def forward(self, x, labels):
            cache = Cache()
            for layer in self.layers:
                x, cache = layer(x, cache)
            return functional.cross_entropy(self.head(x + sum(cache.items)), labels)

    torch.manual_seed(0)
    model, given = Caches(), batch()
    plain = copy.deepcopy(model)
    each(model, given, limit="80%")
    found = train(model, given)
    assert train(plain, given).differences(found) == []
    assert max(found.peaks) <= hybridremat.get_plan(model).predicted_peak


def test_other_shapes_are_planned_when_they_come():
    torch.manual_seed(0)
    model, given = Tower(), batch()
    plain = copy.deepcopy(model)
    each(model, given)
    for rows in (96, 64, 96):
        other = batch(rows)
        hybridremat.prepare(model, kwargs=other)
        assert train(plain, other).differences(train(model, other)) == []


@pytest.mark.parametrize(
    ("units", "why"),
    [
        ("layer.*", r"matches no module of Tower; there are 'layers\.\*'"),
        ("layers", r"'layers' is a ModuleList, which is never called itself.*units=\"layers\.\*\""),
        (["layers.*", "*.up"], r"'\*\.up' matches is inside of other units \('layers\.0\.up'"),
    ],
)
def test_what_names_no_unit_is_said(units, why):
    model, given = Tower(), batch()
    before = state_of(model)
    with pytest.raises(ModelError, match=why):
        each(model, given, units=units)
    assert_untouched(before, model)


def test_what_cannot_be_planned_by_units_is_said():
    given = batch()
    with pytest.raises(CaptureError, match=r"none of the 1 units of Tower was called .*layers\.0\.dropout"):
        each(Tower(around=lambda layer, x: x + layer.up(x)[:, :16]), given, units="layers.0.dropout")
    around = lambda layer, x: checkpoint(layer, x, use_reentrant=False)  # noqa: E731
    with pytest.raises(CaptureError, match=r"'layers\.0' runs inside of torch\.utils\.checkpoint"):
        each(Tower(around=around), given)
    for units in ([3], 3, b"layers.*", nn.Linear(2, 2)):
        with pytest.raises(LimitError, match="no names of modules"):
            each(Tower(), given, units=units)
    for units in ([], (), None, ""):
        with pytest.raises(LimitError, match="name no modules"):
            each(Tower(), given, units=units)
    with pytest.raises(CaptureError, match=r"asks for a value .*not here"):
        hybridremat.plan(Tower(), kwargs=given, memory_limit="60%", units="layers.*", device_spec="h100")
    with pytest.raises(hybridremat.InfeasibleLimitError, match="make the units larger"):
        each(Tower(), given, limit=5000)
    with pytest.raises(BackendCompilerFailed, match=r"units= need hybridremat\.wrap"):
        torch.compile(
            Tower(), backend="hybridremat", options={"memory_limit": "90%", "units": "layers.*"}
        )(**given)


def as_script(layer):
    return torch.jit.script(layer)


def as_trace(layer):
    return torch.jit.trace(layer, torch.randn(4, 16))


def with_script(made):
    torch.manual_seed(0)
    model = Tower(3)
    model.layers[1] = made(nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    return model


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("made", [as_script, as_trace])
def test_torchscript_is_no_unit_and_may_run_between_them(made):
    model, plain, given = with_script(made), with_script(made), batch()
    with pytest.raises(ModelError, match=r"'layers\.1' is TorchScript.*before torch\.jit\.script"):
        each(model, given)
    each(model, given, limit="100%", units=["layers.0", "layers.2"])
    assert train(plain, given).differences(train(model, given)) == []


def test_a_model_with_a_part_that_is_wrapped_says_to_unwrap_it():
    torch.manual_seed(0)
    model, given = Tower(2), batch()
    hybridremat.wrap(model.layers[1], args=(given["x"],), memory_limit="100%", **HOW)
    for how in ({"units": "layers.*"}, {"graph_breaks": "plan"}):
        with pytest.raises(ModelError, match=r"part 'layers\.1' of this Tower is already wrapped.*unwrap"):
            hybridremat.wrap(model, kwargs=given, memory_limit="100%", **HOW, **how)
    hybridremat.unwrap(model.get_submodule("layers.1"))
    each(model, given)


def test_units_are_the_outermost_modules_that_match():
    model = Tower(3)
    assert list(find_units(model, ["layers.*"])) == ["layers.0", "layers.1", "layers.2"]
    assert list(find_units(model, ["layers.1.*", "embed"])) == [
        "embed", "layers.1.up", "layers.1.down", "layers.1.norm", "layers.1.dropout"
    ]


def test_a_policy_tells_units_apart_that_are_alike():
    torch.manual_seed(0)
    model, given = Tower(), batch()
    plain = copy.deepcopy(model)
    each(model, given, limit="90%", policy={"layers.1:gelu": "must_recompute"})
    plan = hybridremat.get_plan(model)
    assert len(plan.parts) == 3 and [pin.values for pin in plan.pins] == [1]
    named = {name for block in plan.blocks for name in block.modules}
    assert named >= {"layers.0.up", "layers.1", "layers.3.up"}
    assert train(plain, given).differences(train(model, given)) == []


class Pair(nn.Module):
    """Takes one tensor or two."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x, y=None):
        return self.down(torch.tanh(self.up(x if y is None else x * y)))


BETWEEN = {
    "as it is": lambda x: x,
    "scaled": lambda x: x * 1.5,
    "viewed": lambda x: x.view(-1, 16),
    "relu": torch.relu,
}


class Drawn(nn.Module):
    """Units that read any earlier results, with some code between them."""

    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        count = draw.randint(3, 5)
        self.first = nn.Linear(16, 16)
        self.units = nn.ModuleList(Pair() for _ in range(count))
        arities = [draw.choice([1, 1, 2]) for _ in range(count)]
        self.reads = [[draw.choice([n, draw.randint(0, n)]) for _ in range(k)] for n, k in enumerate(arities)]
        self.between = [draw.choice(list(BETWEEN)) for _ in range(count)]
        self.residual = [draw.random() < 0.3 for _ in range(count)]
        self.read_at_last = [draw.randint(0, count) for _ in range(2)]

    def forward(self, x, labels):
        made = [self.first(x)]
        for unit, reads, between, residual in zip(
            self.units, self.reads, self.between, self.residual, strict=True
        ):
            given = [BETWEEN[between](made[n]) for n in reads]
            made.append(unit(*given) + given[0] if residual else unit(*given))
        more = sum(made[n].square().mean() for n in self.read_at_last)
        return functional.cross_entropy(made[-1], labels) + more


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("seed", range(24))
def test_whatever_units_read_of_each_other_no_step_takes_more_than_predicted(seed):
    torch.manual_seed(seed)
    model, given = Drawn(seed), batch(64)
    for limit, how in (("100%", {}), (1000, {"on_infeasible": "least"})):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hybridremat.InfeasibleLimitWarning)
            made = each(copy.deepcopy(model), given, limit=limit, units="units.*", **how)
        assert hybridremat.measure(made, kwargs=given).peak <= hybridremat.get_plan(made).predicted_peak


def test_the_gradient_that_a_loss_starts_from_is_counted():
    """Four bytes, where nothing else is counted too high."""

    class Tight(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.units = nn.Linear(16, 16), nn.ModuleList(Pair() for _ in range(3))

        def forward(self, x, labels):
            given = self.first(x).view(-1, 16)
            made = self.units[1](self.units[0](given, given.view(-1, 16)))
            last = self.units[2](torch.relu(made))
            return made.square().mean() + last.square().mean() + last.mean()

    torch.manual_seed(0)
    model, given = Tight(), batch(64)
    each(model, given, limit="100%", units="units.*")
    plan = hybridremat.get_plan(model)
    assert hybridremat.measure(model, kwargs=given).peak <= plan.predicted_peak


class Sums(nn.Module):
    """One gradient for two tensors, one that is a number repeated, and one of its own."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(64, 64)) for _ in range(2))
        self.summed, self.own = nn.Parameter(torch.randn(64, 64)), nn.Linear(64, 4)

    def forward(self, x):
        return (self.own(x + self.one + self.other)).square().mean() + self.summed.sum()


def test_gradients_that_pass_are_counted_by_what_they_are_stored_in():
    torch.manual_seed(0)
    step = traced(Sums(), torch.randn(64, 64))
    places = set(input_gradients(step.module))
    stored = {value: step.graph.values[value].bytes for value in step.graph.gradients}
    assert len(places) == 5 and gradient_bytes_at(step, places) == sum(stored.values())
    assert gradient_bytes_at(step, set()) == 0
    alone = sum(gradient_bytes_at(step, {place}) for place in places)
    assert alone <= sum(stored.values()) < 4 * 64 * 64 * 4


class Handing(nn.Module):
    """A layer that also returns what its own backward reads."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 256), nn.Linear(256, 16)

    def forward(self, x):
        made = self.up(x).sigmoid()
        return x + self.down(made), made


class HandedAround(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Handing() for _ in range(4))
        self.head = nn.Linear(16, 8)

    def forward(self, x, labels):
        seen = []
        for layer in self.layers:
            x, made = layer(x)
            seen.append(made)
        return functional.cross_entropy(self.head(x), labels)


@pytest.mark.parametrize("limit", ["100%", "90%"])
def test_outputs_that_the_forward_drops_count_where_the_backward_reads_them(limit):
    """They are gone with the forward only if nothing of their graph is saved with them."""
    torch.manual_seed(0)
    model, given = HandedAround(), batch()
    each(model, given, limit=limit)
    plan = hybridremat.get_plan(model)
    assert hybridremat.measure(model, kwargs=given).peak == plan.predicted_peak <= plan.memory_limit


def shifted(x):
    return x + 0.5


@pytest.mark.parametrize("before", [False, True], ids=["as of its class at wrap", "its own at wrap"])
def test_a_forward_that_is_put_on_a_unit_after_wrap_runs_from_then_on(before):
    """As libraries of adapters and of hooks do; the first one stays for the other units."""
    torch.manual_seed(0)
    model, given = Tower(2), batch()
    plain = copy.deepcopy(model)
    for each_model in (model, plain):
        if before:
            layer = each_model.layers[1]
            layer.forward = lambda x, layer=layer: 2 * Layer.forward(layer, x)
    each(model, given, limit="1000%")
    learned = [train(each_model, given) for each_model in (plain, model)]
    assert learned[0].differences(learned[1]) == []
    for each_model in (model, plain):
        layer = each_model.layers[1]
        layer.forward = lambda x, layer=layer: Layer.forward(layer, shifted(x))
    with pytest.warns(hybridremat.UnsurveyedPathWarning):
        found = train(model, given, measure=False)
    assert train(plain, given, measure=False).differences(found) == []
    assert "forward" in vars(model.layers[1]) and "forward" not in vars(model.layers[0])
    del model.layers[1].forward, plain.layers[1].forward
    assert train(plain, given).differences(train(model, given)) == []
    assert all("forward" not in vars(layer) for layer in model.layers)


def test_threads_may_call_one_planned_model():
    """One forward at a time: each takes a path through the graphs, and its units stand in for a while."""

    def slowly(layer, x):
        x = layer(x)
        time.sleep(0.01)
        return x

    torch.manual_seed(0)
    model = Tower(3, slowly)
    for layer in model.layers:
        layer.dropout.p = 0.0
    batches = [batch() for _ in range(4)]
    for given in batches:
        given["x"].requires_grad_()
    plain = copy.deepcopy(model)
    each(model, batches[0], limit="1000%", forwards=4)
    expected = [torch.autograd.grad(plain(**given), given["x"])[0] for given in batches]
    starting = Barrier(len(batches))

    def gradients(given):
        starting.wait()
        return [torch.autograd.grad(model(**given), given["x"])[0] for _ in range(3)]

    with ThreadPoolExecutor(len(batches)) as threads:
        found = list(threads.map(gradients, batches))
    for theirs, mine in zip(expected, found, strict=True):
        assert all(torch.equal(theirs, every) for every in mine)
    assert all("forward" not in vars(layer) for layer in model.layers)


class TiedHead(Tower):
    """Two layers alike and one of its own, whose weight the head reads too, in code between units."""

    breaks = True

    def __init__(self):
        super().__init__(3)
        self.layers[2] = Pair()

    def forward(self, x, labels):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
            if self.breaks:
                float(x.detach().sum())
        return functional.cross_entropy(functional.linear(x, self.layers[2].up.weight), labels)


@pytest.mark.parametrize("breaks", [True, False])
def test_a_weight_of_a_unit_that_other_code_reads_steps_when_its_gradient_is_whole(breaks):
    torch.manual_seed(0)
    model, given = TiedHead(), batch()
    model.breaks = breaks
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    steps = []
    model.layers[2].up.weight.register_post_accumulate_grad_hook(lambda p: steps.append(p.grad.clone()))
    hybridremat.optimizer_in_backward(model, lambda p: torch.optim.SGD(p, lr=0.1))
    each(model, given, limit="100%", gradients="in_backward")
    whole = []
    for step in range(3):
        optimizer.zero_grad()
        torch.manual_seed(step)
        plain(**given).backward()
        whole.append(plain.layers[2].up.weight.grad.clone())
        optimizer.step()
        predicted = hybridremat.get_plan(model).predicted_peak
        torch.manual_seed(step)
        assert allocated_peak(lambda: model(**given).backward()) <= predicted
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert len(steps) == 3 and all(map(torch.equal, steps, whole))


def test_a_plan_file_for_other_units_counts_their_graphs(tmp_path):
    torch.manual_seed(0)
    given, file = batch(), tmp_path / "plan.json"
    hybridremat.get_plan(each(Alike(3), given)).save(file)
    said = r"it is for a step of 3 graphs, 1 of them distinct, and this one has "
    others = {"4 graphs, 1 of them distinct": Alike(4), "3 graphs, 2 of them distinct": Tower(3)}
    for found, model in others.items():
        before = state_of(model)
        with pytest.raises(hybridremat.errors.PlanMismatchError, match=said + found):
            hybridremat.wrap(model, kwargs=given, plan=file, progress=False)
        assert_untouched(before, model)
