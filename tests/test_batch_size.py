"""The largest batch, against a plan for every batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import hybridremat
from hybridremat.analysis.batch_capture import BatchCapture
from hybridremat.analysis.sample_step import SampleStep
from hybridremat.errors import InfeasibleLimitError, LimitError, ModelError, TargetError
from hybridremat.graph.joint import plain_schedule
from hybridremat.planning import option_cache, pipeline, planner, sized_capture
from hybridremat.planning.chosen import Chosen
from hybridremat.planning.settings import Settings
from hybridremat.runtime.prepare import capture_only
from hybridremat.sequence.strategies import STRATEGIES
from hybridremat.sequence.strategies.hybrid import HYBRID
from support.training import Mlp
from support.wrapping import HOW

MOST = 16


def make(batch):
    torch.manual_seed(0)
    return Mlp(width=32, layers=4), {"x": torch.randn(8 * batch, 32)}


def make_with_args(batch):
    model, kwargs = make(batch)
    return model, (kwargs["x"],), {}


@pytest.fixture(scope="module", autouse=True)
def no_exchanges():
    """Least peaks that rise with the batch: exchanges lower one more, another less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STRATEGIES, "hybrid", replace(HYBRID, searches=()))
        yield


@pytest.fixture(scope="module")
def curves(no_exchanges):
    """The frontier of each batch, every block solved for it."""
    with pytest.MonkeyPatch.context() as patch:
        found = {}
        for batch in range(1, MOST + 1):
            patch.setattr(planner, "OPTIONS", option_cache.OptionCache())
            model, kwargs = make(batch)
            found[batch] = hybridremat.frontier(model, kwargs=kwargs, **HOW)
    return found


@pytest.fixture
def captures(monkeypatch):
    """The batches that are asked for, with nothing known of any."""
    monkeypatch.setattr(planner, "OPTIONS", option_cache.OptionCache())
    asked = []

    def factory(batch):
        asked.append(batch)
        return make(batch)

    return factory, asked


def brute(curves, limit, need):
    return max((batch for batch, curve in curves.items() if need(curve) <= limit), default=0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("answer", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 15))])
def test_it_is_the_largest_of_all_batches(curves, captures, answer):
    factory, asked = captures
    between = (curves[answer].least.peak + curves[answer + 1].least.peak) // 2
    for limit in (curves[answer].least.peak, between, curves[answer + 1].least.peak - 1):
        asked.clear()
        found = hybridremat.max_batch_size(factory, limit, most=MOST, **HOW)
        assert found.batch_size == answer == brute(curves, limit, lambda curve: curve.least.peak)
        assert found.plain_batch_size == brute(curves, limit, lambda curve: curve.plain_peak)
        assert found.plan.predicted_peak <= limit == found.memory_limit and not found.reached_most
        tried = {each.batch: each for each in found.tried}
        assert tried[answer + 1].least_peak == curves[answer + 1].least.peak > limit
        assert all(each.plain_peak == curves[each.batch].plain_peak for each in found.tried)
        assert sorted(asked) == sorted(tried) and len(asked) <= 9, asked


def test_the_plan_and_the_costs_are_those_of_that_batch(curves, captures):
    factory, _ = captures
    limit = curves[12].least.peak
    found = hybridremat.max_batch_size(factory, limit, most=MOST, **HOW)
    model, kwargs = make(12)
    alone = hybridremat.plan(model, kwargs=kwargs, memory_limit=limit, **HOW)
    assert replace(found.plan, blocks=(), details=None) == replace(alone, blocks=(), details=None)
    mine, its = ([(b.option_count, b.saved_bytes) for b in each.blocks] for each in (found.plan, alone))
    assert mine == its  # names of ops differ
    assert found.overhead == found.plan.overhead > 0
    plain = {n: sum(op.time for op in curves[n].plan(memory_limit="1000%").details.graph.ops) for n in curves}
    alone = plain[found.plain_batch_size] / found.plain_batch_size
    assert found.per_sample == pytest.approx(plain[12] * (1 + found.overhead) / 12 / alone - 1)
    text = str(found)
    assert "batch 12 is the largest" in text and "batch 13 needs" in text
    assert f"the largest batch is {found.plain_batch_size}:" in text
    hybridremat.wrap(model, kwargs=kwargs, plan=found.plan, progress=False)


def test_batches_are_traced_from_one_capture(captures, monkeypatch):
    made = []
    for module in (pipeline, sized_capture):
        original = module.capture
        monkeypatch.setattr(module, "capture", lambda *a, _of=original, **k: made.append(a) or _of(*a, **k))
    counts = {}
    for dynamic in (None, False):
        made.clear()
        found = hybridremat.max_batch_size(captures[0], 80_000, most=MOST, dynamic=dynamic, **HOW)
        counts[dynamic] = len(made), found.batch_size, found.plan.schedule
    assert counts[None][0] == 2 < counts[False][0]
    assert counts[None][1:] == counts[False][1:]


def test_an_overhead_is_kept_too(curves, captures):
    factory, _ = captures
    limit, most = curves[12].least.peak, 0.05

    def need(curve):
        return curve.plan(max_overhead=most).predicted_peak

    found = hybridremat.max_batch_size(factory, limit, most=MOST, max_overhead="5%", **HOW)
    assert found.plain_batch_size <= found.batch_size < 12
    assert found.batch_size == brute(curves, limit, need) and found.overhead <= most


def test_with_exchanges_the_batch_fits_and_the_next_does_not(captures, monkeypatch):
    monkeypatch.setitem(STRATEGIES, "hybrid", HYBRID)
    factory, _ = captures
    found = hybridremat.max_batch_size(factory, 40_000, most=MOST, **HOW)
    assert found.plan.predicted_peak <= 40_000
    model, kwargs = make(found.batch_size + 1)
    with pytest.raises(InfeasibleLimitError):
        hybridremat.plan(model, kwargs=kwargs, memory_limit=40_000, **HOW)


def test_a_reserve_is_kept_free(captures):
    factory, _ = captures
    bare = hybridremat.max_batch_size(factory, 80_000, most=MOST, **HOW)
    kept = hybridremat.max_batch_size(factory, 80_000, most=MOST, reserve=40_000, **HOW)
    assert kept.batch_size < bare.batch_size and kept.plan.needed <= 80_000
    assert kept.plan.reserve == 40_000


def test_a_guess_that_is_too_high_and_positional_inputs(curves, captures):
    limit = curves[7].least.peak
    for factory in (make, make_with_args):
        found = hybridremat.max_batch_size(factory, limit, start=14, most=MOST, **HOW)
        assert found.batch_size == 7


def test_the_largest_batch_allowed_fits(curves, captures):
    factory, _ = captures
    found = hybridremat.max_batch_size(factory, 10 * curves[5].plain_peak, most=5, **HOW)
    assert (found.batch_size, found.plain_batch_size, found.reached_most) == (5, 5, True)
    assert "no larger one was asked for" in str(found)
    assert found.overhead == 0 and found.per_sample == 0


def test_batch_1_does_not_fit(curves, captures):
    factory, _ = captures
    with pytest.raises(InfeasibleLimitError, match="batch 1 needs") as caught:
        hybridremat.max_batch_size(factory, curves[1].least.peak - 1, most=MOST, start=3, **HOW)
    assert caught.value.least == curves[1].least.peak
    assert caught.value.limit == curves[1].least.peak - 1


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"model_factory": 3}, TargetError, "model_factory is a int"),
        ({"model_factory": lambda batch: Mlp()}, TargetError, "called with batch 1, should return"),
        ({"model_factory": lambda batch: (Mlp(), 3)}, TargetError, r"it returned \(Mlp, int\)"),
        ({"model_factory": lambda batch: (Mlp().requires_grad_(False), {})}, ModelError, "no trainable"),
        ({"memory_limit": "50%"}, LimitError, "grows with the batch"),
        ({"memory_limit": "much"}, LimitError, "cannot be read"),
        ({"start": 0}, LimitError, "start=0"),
        ({"most": 2.5}, LimitError, "most=2.5"),
        ({"start": 9, "most": 8}, LimitError, "beyond most=8"),
    ],
)
def test_what_cannot_be_searched_is_said(arguments, kind, message):
    given = {"model_factory": make, "memory_limit": 10**6, **arguments, **HOW}
    with pytest.raises(kind, match=message):
        hybridremat.max_batch_size(**given)


def steps_of(kind):
    """A step of each batch; of batches above 4 the model is another one."""

    def made(batch):
        torch.manual_seed(0)
        model = Mlp(width=32, layers=5 if kind == "deeper" and batch > 4 else 4)
        if kind == "frozen" and batch > 4:
            model.layers[0].requires_grad_(False)
        if kind == "eval" and batch > 4:
            model.layers[1].eval()
        return SampleStep(model, (), {"x": torch.randn(8 * batch, 32)})

    return made


@pytest.mark.parametrize("kind", ["alike", "deeper", "frozen", "eval"])
def test_a_capture_is_of_one_model(kind):
    made = steps_of(kind)
    capture = BatchCapture(Settings(memory_limit="100%", dynamic=None, workers=1).validated(need_limit=True))
    assert capture.traced(made(2)) is None  # captured as it is
    assert capture.traced(made(4)) is not None
    for batch in (3, 6):
        step = capture.traced(made(batch))
        if kind != "alike" and batch > 4:
            assert step is None
            continue
        alone = []
        one = made(batch)
        capture_only(one.model, one.args, one.kwargs, Settings(memory_limit="100%"), kept_in(alone))
        expected = [value.bytes for value in alone[0].graph.values]
        assert [value.bytes for value in step.graph.values] == expected


def kept_in(found):
    def choose(traced):
        found.append(traced)
        return Chosen(traced, plain_schedule(traced.graph))

    return choose
