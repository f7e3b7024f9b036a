"""Plans of pipelines: cuts, limits, figures, what is refused. Processes: tests/test_pipeline_training.py."""

from __future__ import annotations

import pickle
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.distributed import pipelining

import hybridremat
from hybridremat.analysis.pipelines import estimates, planning, stages
from hybridremat.analysis.pipelines.pieces import cut_in_pieces
from hybridremat.sequence.pipeline.orders import PipelineShape
from hybridremat.sequence.pipeline.replay import replay
from support.torch_pipelines import event_time, most_waiting, torch_orders

HOW = {"cost_model": "flops", "workers": 1}
KIB = 1024
MEMORY = 132 * KIB
LINK = 1e9  # bytes in a second


class Block(nn.Module):
    """A residual block whose hidden values are worth recomputing."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks between an entry and a head."""

    def __init__(self, hidden: tuple[int, ...] = (32,) * 6, width: int = 16) -> None:
        super().__init__()
        self.entry = nn.Linear(8, width)
        self.inner = nn.Module()
        self.inner.layers = nn.ModuleList(Block(width, each) for each in hidden)
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.entry(x)
        for layer in self.inner.layers:
            x = layer(x)
        return self.head(x)


def loss_of(output, target):
    return nn.functional.mse_loss(output, target)


def planned(model=None, memory=MEMORY, **more):
    given = {"stages": 2, "microbatches": 4, "loss_fn": loss_of, "target": torch.zeros(64, 4)} | HOW | more
    return hybridremat.pipeline_plan(
        Net() if model is None else model, (torch.zeros(64, 8),), device_memory=memory, **given
    )


@pytest.fixture(scope="module")
def net():
    return Net().eval()


@pytest.fixture(scope="module")
def made():
    """What was captured for the plan."""
    return []


@pytest.fixture(scope="module")
def plan(net, made):
    whole, each = stages.make_planned_call, estimates.piece_frontier
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "make_planned_call", lambda *a, **k: made.append("stage") or whole(*a, **k))
        patch.setattr(estimates, "piece_frontier", lambda *a, **k: made.append("layer") or each(*a, **k))
        return planned(net, link=LINK)


def test_the_model_is_as_it_was(net, plan):
    assert not any("forward" in vars(module) or module.training for module in net.modules())
    assert all(each.grad is None for each in net.parameters())
    assert net(torch.zeros(2, 8)).shape == (2, 4)


def test_every_layer_is_in_one_stage_and_every_stage_fits(plan):
    names = [name for stage in plan.stages for name in stage.layers]
    assert names == [f"inner.layers.{n}" for n in range(6)]
    assert all(stage.predicted_peak <= stage.device_memory == MEMORY for stage in plan.stages)
    assert any(stage.extra_time > 0 for stage in plan.stages)
    assert plan.split_spec == {plan.stages[1].layers[0]: pipelining.SplitPoint.BEGINNING}


def test_figures_are_those_of_events_in_the_order_of_torch(plan):
    orders = torch_orders("1f1b", 2, 4, 1)
    sent = round(64 * 16 * 4 / LINK * 1e9)
    times = [(stage.forward_time, stage.backward_time, sent) for stage in plan.stages]
    assert abs(plan.step_time - event_time(orders, times)) <= 0.01 * plan.step_time
    assert tuple(stage.forwards for stage in plan.stages) == most_waiting(orders, 2)
    busy = 4 * sum(sum(each[:2]) for each in times)
    assert plan.bubble == pytest.approx(1 - busy / (2 * plan.step_time))
    assert max(span.end for span in plan.timeline) == plan.step_time
    assert len(plan.timeline) == 16


def test_modules_that_torch_makes_take_the_limits(net, plan):
    pipe = pipelining.pipeline(Net(), (torch.zeros(64, 8),), split_spec=plan.split_spec)
    for stage in plan.stages:
        module, how = pipe.get_stage_module(stage.index), plan.wrap_kwargs(stage.index)
        assert set(HOW) <= set(how)
        hybridremat.wrap(module, plan.args(stage.index), progress=False, **how)
        made = hybridremat.get_plan(module)
        assert made.needed <= stage.memory_limit == how["memory_limit"]
        assert made.request.forwards == stage.forwards


def test_it_is_data_and_prints_as_a_table(plan):
    assert pickle.loads(pickle.dumps(plan)) == plan  # noqa: S301 - our own
    first, head, *rows = str(plan).splitlines()
    assert first.startswith("1f1b: 4 microbatches on 2 devices, ")
    assert head.split()[:3] == ["stage", "device", "layers"]
    assert len(rows) == 2


def test_equal_layers_are_captured_once(plan, made):
    assert made.count("layer") == 3  # the first with the entry, one between, the last with the head
    assert made.count("stage") <= 6


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["400KiB", "260KiB"])
def test_cuts_are_near_the_best_of_all(memory):
    """Every cut of unequal layers, each stage planned, against the one that is found."""
    model, step_times = Net((8, 96, 16, 64, 32, 8)), {}
    made = []
    real = planning.find_pipeline

    def noting(costs, names):
        made.append(costs)
        return real(costs, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "find_pipeline", noting)
        found = planned(model, memory=memory, stages=3)
    (costs,) = made
    for inner in combinations(range(1, 6), 2):
        every = [costs.planned(n, *each) for n, each in enumerate(pairwise((0, *inner, 6)))]
        if all(each.least is None for each in every):
            step = replay(PipelineShape("1f1b", 3, 4).orders(), [each.times for each in every])
            step_times[inner] = step.time
    assert len(step_times) > 1
    assert found.step_time <= 1.01 * min(step_times.values())


def test_a_stage_that_does_not_fit_says_what_it_needs():
    with pytest.raises(hybridremat.InfeasibleLimitError, match=r"stage \d \(inner\.layers\.\d") as raised:
        planned(memory=60 * KIB)
    assert raised.value.least > raised.value.limit == 60 * KIB
    assert "Use more stages" in str(raised.value)


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", "ScheduleDualPipeV", "InterleavedZeroBubble"])
def test_schedules_that_split_the_backward_are_refused(schedule):
    with pytest.raises(hybridremat.LimitError, match="two parts"):
        planned(schedule=schedule)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schedule": "loop"}, "is not known; use '1f1b'"),
        ({"memory": "60%"}, "is a share"),
        ({"memory": ["1MiB"] * 3}, "3 entries for 2 devices"),
        ({"stages": 0}, "stages"),
        ({"stages": 1}, "no pipeline"),
        ({"microbatches": 1}, "Schedule1F1B takes at least one"),
        ({"microbatches": 5, "schedule": "interleaved1f1b", "stages_per_device": 2}, "multiple of 2"),
        ({"stages_per_device": 2}, "interleaved1f1b"),
        ({"optimizer_slots": -1}, "optimizer_slots"),
        ({"link": 0}, "no rate"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(given, says):
    with pytest.raises(hybridremat.LimitError, match=says):
        planned(**given)


def test_models_without_enough_layers_are_refused():
    with pytest.raises(hybridremat.ModelError, match=r"7 stages, and 'inner\.layers' has 6 children"):
        planned(stages=7, microbatches=8)
    with pytest.raises(hybridremat.ModelError, match="no ModuleList and no Sequential"):
        planned(nn.Linear(8, 4))
    with pytest.raises(hybridremat.ModelError, match="layers='inner' is no ModuleList"):
        planned(layers="inner")
    with pytest.raises(TypeError, match="unexpected keyword"):
        planned(memory_limit="1GiB")


class Skipping(Net):
    """All layers read what the entry makes, and give it on in pairs."""

    def forward(self, x):
        first = x = self.entry(x)
        shift = None
        for layer in self.inner.layers:
            x, shift = layer(x) + first, (x if shift is None else x + shift)
        return self.head(x + shift)


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_stages_together_are_the_model(cut):
    torch.manual_seed(0)
    model, x = Skipping(), torch.randn(64, 8)
    pieces = cut_in_pieces(model, (), {"x": x}, [f"inner.layers.{n}" for n in range(6)])
    front, back = pieces.stage(0, cut), pieces.stage(cut, 6)
    (made,) = (node.args[0] for node in front.module.graph.nodes if node.op == "output")
    between = dict(zip([node.name for node in made], front.module(x), strict=True))
    read = [node.name for node in back.module.graph.nodes if node.op == "placeholder"]
    (output,) = back.module(*(between[name] for name in read))
    assert torch.equal(output, model(x))
    assert front.sent == sum(each.nbytes for each in between.values())
    assert front.sent == sum(each.bytes for each in back.inputs)
    assert all(each.received and each.requires_grad for each in back.inputs)
    assert back.sent == 64 * 4 * 4
    assert [(each.received, each.shape) for each in front.inputs] == [(False, (64, 8))]


def test_pieces_are_alike_only_in_the_same_place():
    tower = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    kinds = cut_in_pieces(tower, (torch.zeros(2, 8),), {}, [*"01234"]).kinds
    assert [kinds.index(kind) for kind in kinds] == [0, 1, 1, 1, 4]
    tower[2] = nn.Linear(8, 8, bias=False)
    kinds = cut_in_pieces(tower, (torch.zeros(2, 8),), {}, [*"01234"]).kinds
    assert [kinds.index(kind) for kind in kinds] == [0, 1, 2, 1, 4]


class Twice(Net):
    def forward(self, x):
        x = self.entry(x)
        for layer in [*self.inner.layers, self.inner.layers[1]]:
            x = layer(x)
        return self.head(x)


class ByValue(Net):
    def forward(self, x):
        return super().forward(x if x.sum() > 0 else -x)


def test_models_that_cannot_be_cut_are_refused():
    with pytest.raises(hybridremat.CaptureError, match="once each"):
        planned(Twice())
    with pytest.raises(hybridremat.CaptureError, match=r"cannot cut this ByValue"):
        planned(ByValue())
