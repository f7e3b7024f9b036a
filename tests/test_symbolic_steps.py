"""Steps that are captured once, with symbols for sizes: at every size the bits of the plain one, and the peak
that is predicted there."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn

from hybridremat.compiler.emit import emit
from hybridremat.compiler.lifted import twin
from hybridremat.errors import InfeasibleLimitError, PlanError
from hybridremat.graph.costs.cost_models import FlopsCost
from hybridremat.graph.costs.kernel_store import KernelStore
from hybridremat.graph.joint import ops_by_parts, plain_schedule
from hybridremat.graph.memory import step_memory
from hybridremat.graph.rewrites import with_rewrites
from hybridremat.planning import step_costs
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.context import PlanContext
from hybridremat.planning.other_sizes import checked, differences, fastest_elsewhere, moved, run_alike
from hybridremat.planning.pipeline import rewriting_of
from hybridremat.planning.planner import choose_schedule, step_frontier
from hybridremat.planning.settings import Settings
from hybridremat.sequence.judge import Judge
from hybridremat.zoo.models import reference_model
from support.examples import examples
from support.extreme_schedules import extreme_schedule
from support.symbolic import captured, dynamic, traced_at
from support.training import ConvNet, Mlp, Running, Transformer, allocated_peak, loss_in, train, with_costs

STORE = KernelStore()


def seeded(size):
    return torch.Generator().manual_seed(size)


def tokens(batch, length):
    return {"tokens": torch.randint(0, 50, (batch, length), generator=seeded(batch * length))}


def images(batch):
    drawn = torch.randn(batch, 3, 12, 12, generator=seeded(batch))
    return {"x": drawn, "labels": torch.randint(0, 5, (batch,), generator=seeded(batch))}


def rows(batch):
    return {"x": torch.randn(batch, 16, generator=seeded(batch))}


def extreme(seed):
    """A way to choose: a schedule that recomputes at random, the same at every size, over whatever it can."""

    def choose(step):
        step = with_rewrites(with_costs(step, FlopsCost(), STORE), STORE)
        return Chosen(step, extreme_schedule(step.graph, seed, 0.5))

    return choose


def small_transformer():
    return Transformer(layers=1, width=16)


def plainly(step):
    step = with_costs(step, FlopsCost(), STORE)
    return Chosen(step, plain_schedule(step.graph))


def predicted(wrapped, choose, sizes):
    """The peak of the schedule that runs at some sizes, by the step there."""
    portfolio = wrapped.portfolio
    at = dict(zip(portfolio.steps.joint.inputs, sizes, strict=True))
    member = portfolio.members[portfolio.numbers[tuple(sizes)]]
    graph = moved(member.graph, member.schedule, choose(portfolio.steps.at(at).traced).step.graph)
    return step_memory(graph, member.schedule).peak


STEPS = {
    "attention": (small_transformer, tokens, (2, 24), [(3, 17), (2, 40)], {0: (0, 1)}),
    "convolutions": (ConvNet, images, (4,), [(7,), (3,)], {0: (0,), 1: (0,)}),
    "buffers": (Running, rows, (32,), [(9,), (200,)], {0: (0,)}),
}


@pytest.mark.parametrize("name", [*STEPS])
def test_one_pair_of_graphs_trains_as_the_plain_model_at_every_size(name):
    make, draw, sample, others, symbols = STEPS[name]
    torch.manual_seed(0)
    model = make()
    plain, choose = copy.deepcopy(model), extreme(3)
    wrapped = dynamic(model, draw(*sample), symbols, choose)
    for sizes in (sample, *others):
        wrapped.prepare(*sizes)
        mine, theirs = train(wrapped, draw(*sizes), steps=2), train(plain, draw(*sizes), steps=2)
        assert theirs.differences(mine) == [], sizes
        assert max(mine.peaks) == predicted(wrapped, choose, sizes), sizes
    assert wrapped.backend.graphs == len(wrapped.portfolio.members) == 1


def by_length(step):
    """Long inputs recompute, short ones do not, and save another number of tensors."""
    longest = max(value.shape[1] for value in step.graph.values if value.name == "primals_3")
    return (extreme(1) if longest > 20 else plainly)(step)


@pytest.mark.parametrize("most", [None, 1])
def test_each_call_runs_the_schedule_of_its_sizes_and_each_backward_that_of_its_forward(most, caplog):
    torch.manual_seed(0)
    model = small_transformer()
    plain = copy.deepcopy(model)
    wrapped = dynamic(model, tokens(2, 24), {0: (0, 1)}, by_length)
    wrapped.portfolio.most = most  # of these, the others are let go, and emitted again in their backwards
    caplog.set_level(logging.INFO, "hybridremat")

    def gradients(of):
        torch.manual_seed(5)
        losses = [loss_in(of(**tokens(2, length))) for length in (24, 11, 30)]
        losses[1].backward(retain_graph=True)
        losses[0].backward()
        losses[1].backward()
        losses[2].backward()
        made = [parameter.grad for parameter in of.parameters()]
        of.zero_grad(set_to_none=True)
        return [*made, torch.get_rng_state()]

    for _ in range(2):
        assert all(map(torch.equal, gradients(wrapped), gradients(plain)))
    portfolio = wrapped.portfolio
    assert portfolio.numbers == {(2, 24): 0, (2, 11): 1, (2, 30): 0} and wrapped.backend.graphs == 1
    assert len(portfolio.emitted) == (most or 2)
    assert caplog.text.count("is emitted again") == (0 if most is None else 11)
    backwards = [portfolio.graphs(number).lifted.backward.graph for number in range(2)]
    assert len(backwards[0].find_nodes(op="placeholder")) != len(backwards[1].find_nodes(op="placeholder"))


@pytest.mark.slow
def test_a_limit_in_bytes_holds_at_every_size_without_a_capture():
    torch.manual_seed(0)
    model, limit = Transformer(), 500_000
    plain = copy.deepcopy(model)
    settings = Settings(memory_limit=limit, cost_model="flops", workers=1).validated(need_limit=True)
    context = PlanContext.of(settings)
    choose = partial(choose_schedule, context=context)
    wrapped = dynamic(model, tokens(2, 24), {0: (0, 1)}, choose, rewriting_of(settings))
    for sizes in ((2, 24), (2, 33), (3, 20), (2, 5)):
        wrapped.prepare(*sizes)
        mine, theirs = train(wrapped, tokens(*sizes), steps=1), train(plain, tokens(*sizes), steps=1)
        assert theirs.differences(mine) == []
        assert max(mine.peaks) == context.store.current.predicted_peak <= limit
    with pytest.raises(InfeasibleLimitError):
        wrapped(**tokens(4, 60))
    assert wrapped.backend.graphs == 1
    assert train(plain, tokens(2, 24), steps=1).differences(train(wrapped, tokens(2, 24), steps=1)) == []


@pytest.fixture(scope="module")
def mlp():
    torch.manual_seed(0)
    model, choose = Mlp(16), extreme(6)
    return copy.deepcopy(model), dynamic(model, rows(8), {0: (0,)}, choose), choose


@examples(20)
@given(st.integers(2, 400))
def test_any_batch_of_an_mlp(mlp, batch):
    plain, wrapped, choose = mlp
    wrapped.prepare(batch)
    mine, theirs = (train(each, rows(batch), steps=1, measure=False) for each in (wrapped, plain))
    assert theirs.differences(mine) == []
    for each in (wrapped, plain):
        each.zero_grad()
    drawn = rows(batch)
    peak = allocated_peak(lambda: wrapped(**drawn).backward())
    assert peak == predicted(wrapped, choose, (batch,))


class Fractions(nn.Module):
    """Divides by sizes, and by what is computed from them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        y = self.layer(x) * len(x) ** -0.5
        return (y.sin() / math.sqrt(len(x) + 3)).sum() / float(len(x)) + y.cos().mean()


def test_fractions_that_are_computed_from_sizes():
    torch.manual_seed(0)
    model, choose = Fractions(), extreme(1)
    plain = copy.deepcopy(model)
    wrapped = dynamic(model, rows(6), {0: (0,)}, choose)
    for batch in (6, 11, 2):
        wrapped.prepare(batch)
        mine, theirs = (train(each, rows(batch), steps=1) for each in (wrapped, plain))
        assert theirs.differences(mine) == []
        assert max(mine.peaks) == predicted(wrapped, choose, (batch,))
    assert wrapped.backend.graphs == len(wrapped.portfolio.members) == 1


class Branches(nn.Module):
    """Another graph for long inputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        y = self.first(x)
        return (self.second(y.sin()) if len(x) <= 10 else self.second(y.cos()).tanh()).pow(2).sum()


def test_sizes_outside_of_the_capture_are_captured_once_more_for_each_side():
    torch.manual_seed(0)
    model = Branches()
    plain = copy.deepcopy(model)
    wrapped = dynamic(model, rows(6), {0: (0,)}, extreme(0))
    captures = []
    for batch in (6, 3, 12, 40, 10, 1, 1):
        mine, theirs = (train(each, rows(batch), steps=1, measure=False) for each in (wrapped, plain))
        assert theirs.differences(mine) == []
        captures.append(wrapped.backend.graphs)
    assert captures == [1, 1, 2, 2, 2, 3, 3]


@pytest.mark.filterwarnings("ignore::hybridremat.errors.KeptGradientWarning")
def test_gradients_leave_early_at_every_size():
    torch.manual_seed(0)
    model = Transformer(1, 16)
    plain, left = copy.deepcopy(model), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: left.append(each.grad.sum().item()))
    wrapped = dynamic(model, tokens(2, 24), {0: (0, 1)}, by_length, early_gradients=True)
    for length in (24, 11):
        mine, theirs = (train(each, tokens(2, length), steps=2, measure=False) for each in (wrapped, plain))
        assert theirs.differences(mine) == []
    assert len(left) == 4 * len(list(model.parameters()))
    assert all(member.graph.deliveries for member in wrapped.portfolio.members)


MOVED = extreme(2)


@pytest.fixture(scope="module")
def wrapped():
    torch.manual_seed(0)
    return dynamic(small_transformer(), tokens(2, 24), {0: (0, 1)}, MOVED)


def at(wrapped, *sizes):
    """The step at some sizes, traced and as it is planned, and its first schedule moved there."""
    steps, member = wrapped.portfolio.steps, wrapped.portfolio.members[0]
    sized = steps.at(dict(zip(steps.joint.inputs, sizes, strict=True)))
    step = MOVED(sized.traced).step
    return sized, step, moved(member.graph, member.schedule, step.graph), member


def calls(module):
    """The calls of a graph, each node by its place: copies have other names."""
    used = [node for node in module.graph.nodes if node.op == "call_function" or node.users]
    place = {node: f"%{number}" for number, node in enumerate(used)}
    given = [fx.map_arg((node.args, node.kwargs), place.__getitem__) for node in used]
    return [(node.op, node.target, str(each)) for node, each in zip(used, given, strict=True)]


def test_lifted_graphs_at_the_sizes_of_the_sample_are_those_that_were_emitted(wrapped):
    sized, step, graph, member = at(wrapped, 2, 24)
    assert graph == member.graph
    emitted = emit(step, member.schedule)
    for mine, theirs in zip(wrapped.portfolio.graphs(0).lifted.at(sized.instance), emitted, strict=True):
        assert calls(mine) == calls(theirs)
    assert not wrapped.portfolio.graphs(0).lifted.fixed


def all_by_parts(step):
    """Everything by parts that can be, over whatever it can."""
    step = extreme(2)(step).step
    graph = ops_by_parts(step.graph)
    return Chosen(replace(step, graph=graph), extreme_schedule(graph, 2, 0.5))


def test_what_is_emitted_again_is_what_was_emitted():
    torch.manual_seed(0)
    draw = partial(tokens, 4)  # dropout goes by rows there
    portfolio = dynamic(Transformer(1, 64), draw(64), {0: (0, 1)}, all_by_parts).portfolio
    assert any(op.runs.kernel for op in portfolio.members[0].graph.ops)
    before = portfolio.graphs(0)
    portfolio.emitted.clear()
    after = portfolio.graphs(0)
    assert after is not before and after.overwritten == before.overwritten
    for name in ("forward", "backward"):
        assert calls(getattr(after.lifted, name)) == calls(getattr(before.lifted, name))


def test_those_that_ran_longest_ago_are_let_go():
    seeds = iter((3, 4, 5))  # another schedule at each size
    torch.manual_seed(0)
    portfolio = dynamic(Mlp(16, 3), rows(8), {0: (0,)}, lambda step: extreme(next(seeds))(step)).portfolio
    portfolio.most = 2
    for batch in (9, 8, 10):
        number = portfolio.number_for(dict.fromkeys(portfolio.steps.joint.inputs, batch))
        portfolio.graphs(number)
    assert len(portfolio.members) == 3 and list(portfolio.emitted) == [0, 2]


def test_a_number_that_should_be_a_size_is_refused_at_other_sizes(wrapped):
    lifted = wrapped.portfolio.graphs(0).lifted
    damaged = replace(lifted, forward=twin(lifted.forward))
    view = next(n for n in damaged.forward.graph.nodes if str(n.target) == "aten.ones.default")
    view.args = ([24, 24],)
    sized, step, graph, member = at(wrapped, 2, 24)
    assert checked(damaged, step, graph, sized.instance).peak == step_memory(graph, member.schedule).peak
    sized, step, graph, _ = at(wrapped, 3, 17)
    checked(lifted, step, graph, sized.instance)
    with pytest.raises(PlanError):
        checked(damaged, step, graph, sized.instance)


def test_a_schedule_moves_only_where_its_ways_to_run_are_known(wrapped):
    _, step, graph, member = at(wrapped, 3, 17)
    assert graph is not None and not list(differences(graph, member.graph))
    plain = tuple(replace(op, overwrites=(), variants=()) for op in step.graph.ops)
    assert moved(member.graph, member.schedule, replace(step.graph, ops=plain)) is None
    assert moved(member.graph, member.schedule, replace(step.graph, ops=step.graph.ops[:-1])) is None


def by_parts(step, point):
    return ops_by_parts(step.graph, point.parted)


def test_the_fastest_schedule_that_fits_elsewhere_is_that_of_all():
    torch.manual_seed(0)
    joint = captured(small_transformer(), tokens(2, 24), {0: (0, 1)})
    symbolic = joint.symbolic()
    settings = Settings(memory_limit="60%", cost_model="flops", workers=1).validated(need_limit=True)
    context = PlanContext.of(settings)

    def costed(*sizes):
        step = traced_at(joint, symbolic, *sizes)
        return step_costs.with_costs(step, settings, context.agreement, context.progress)

    found, timings = costed(2, 24)
    points = sorted(step_frontier(found, timings, context).candidates, key=lambda point: point.time)
    other = costed(3, 17)[0].graph  # where dropout does not run by rows
    assert any(point.parted for point in points) and not any(op.variants for op in other.ops if op.random)
    peaks = [step_memory(run_alike(by_parts(found, point), other), point.schedule).peak for point in points]
    assert len(set(peaks)) > 5
    for limit in (min(peaks) - 1, min(peaks), sorted(peaks)[len(peaks) // 2], max(peaks)):
        chosen = fastest_elsewhere(found.graph, points, Judge(other), limit)
        fitting = [point for point, peak in zip(points, peaks, strict=True) if peak <= limit]
        assert (chosen[0] if chosen else None) is (fitting[0] if fitting else None)
        assert chosen is None or step_memory(chosen[1], chosen[0].schedule).peak <= limit


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batches"), [("unet", (6, 3, 7)), ("resnet50", (8, 13))])
def test_rewrites_of_convolutions_move_to_other_batches(name, batches):
    changes = {"unet": {"pixels": 32, "depth": 2, "base": 16}, "resnet50": {"pixels": 32}}[name]
    model, _ = reference_model(name, 0.0, changes)
    plain = copy.deepcopy(model)
    if name == "resnet50":
        model.config.problem_type = plain.config.problem_type = "single_label_classification"

    def draw(batch):
        x = torch.randn(batch, 3, 32, 32, generator=seeded(batch))
        if name == "unet":
            return {"x": x, "labels": torch.zeros(batch, 32, 32, dtype=torch.int64)}
        return {"pixel_values": x, "labels": torch.randint(0, 10, (batch,), generator=seeded(batch))}

    settings = Settings(memory_limit="100%", cost_model="flops", workers=1).validated(need_limit=True)
    choose = extreme(4)
    wrapped = dynamic(model, draw(batches[0]), {0: (0,), 1: (0,)}, choose, rewriting_of(settings))
    for batch in batches:
        wrapped.prepare(batch)
        mine, theirs = train(wrapped, draw(batch), steps=2), train(plain, draw(batch), steps=2)
        assert theirs.differences(mine) == []
        assert max(mine.peaks) == predicted(wrapped, choose, (batch,))
    assert wrapped.backend.graphs == len(wrapped.portfolio.members) == 1


def test_a_step_in_training_frees_all_that_it_took(wrapped):
    wrapped.prepare(2, 11)

    def run():
        loss_in(wrapped(**tokens(2, 11))).backward()

    run()
    wrapped.zero_grad(set_to_none=False)
    assert allocated_peak(run) == allocated_peak(run)
