"""Limits of a job: they are those that trying every value one by one finds."""

from dataclasses import replace
from itertools import takewhile

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.planner import limits as limits_of_planner
from perfmodel.planner.uniform.sweep import sweep
from perfmodel.verbs.searching import space_in
from perfmodel.verbs.setting import make_job, make_setting
from tests.cost.jobs import make_model
from tests.marks import mostly_slow

MODEL = make_model(num_hidden_layers=4, max_position_embeddings=1 << 20, position="rotary")


def small(capacity):
    cluster = perfmodel.load_cluster("dgx-h100", num_chips=8)
    return replace(cluster, chip=replace(cluster.chip, memory=replace(cluster.chip.memory, capacity=capacity, usable=0.0)))


@pytest.fixture(scope="module")
def cluster():
    """A node of chips of which four hold a few sequences."""
    return small(0.45e9)


def fits(cluster, *, chips=4, global_batch, seq_len=1024, **knobs):
    job = make_job(MODEL, global_batch=global_batch, seq_len=seq_len)
    setting = make_setting(job, cluster, chips=chips, calibration="spec-sheet", profile="megatron")
    space, attention = space_in(setting, Knobs(**knobs), {})
    return sweep(setting.estimator, replace(space, orders=space.orders[:1]), top=1, attention=attention).counts.num_feasible > 0


#: Without the gigabytes that frameworks hold in addition to tensors: the chips are small.
BARE = {"calibration": "spec-sheet", "profile": "megatron"}


def limits(cluster, **given):
    return perfmodel.find_limits(**{"model": MODEL, "cluster": cluster, "chips": 4, "seq_len": 1024} | BARE | given)


@pytest.mark.parametrize(
    "given", mostly_slow([{"recompute": "none", "dp_replicate": 4}, {"tp": 2, "recompute": "none"}]), ids=["ddp", "tp"]
)
def test_the_limits_are_those_of_trying_every_value(cluster, given):
    result = limits(cluster, **given)
    micro = list(takewhile(lambda b: fits(cluster, global_batch=4 * b, micro_batch=b, **given), range(1, 100)))
    assert result.micro_batch.value == len(micro)
    assert result.micro_batch.limited_by == "memory"
    assert result.micro_batch.prediction[0].fits
    assert result.micro_batch.prediction[0].plan.micro_batch == len(micro)
    following = result.seq_len.value + result.seq_len.value // 64 + 128
    assert fits(cluster, global_batch=4, micro_batch=1, seq_len=result.seq_len.value, **given)
    assert not fits(cluster, global_batch=4, micro_batch=1, seq_len=following // 128 * 128, **given)


@pytest.mark.slow
def test_the_largest_global_batch_is_that_of_every_pair_of_degrees(cluster):
    result = limits(cluster, tp=1, cp=1, recompute="none")
    best = 0
    for pp, dp in ((1, 4), (2, 2), (4, 1)):
        micro = takewhile(
            lambda b: fits(cluster, global_batch=pp * dp * b, micro_batch=b, pp=pp, dp=dp, tp=1, cp=1, recompute="none"),  # noqa: B023
            range(1, 100),
        )
        best = max(best, pp * dp * len(list(micro)))
    assert result.global_batch.value == best > 0
    plan = result.global_batch.prediction[0].plan
    assert plan.job.global_batch == best
    assert plan.num_microbatches == plan.layout.pp


@pytest.mark.parametrize("given", mostly_slow([{}, {"zero": 1, "pp": 1}]), ids=["free", "zero-1"])
def test_the_fewest_chips_are_the_first_with_a_plan(given):
    cluster = small(0.22e9)  # one of them does not hold the states
    result = limits(cluster, chips=None, **given)
    enough = next(n for n in (1, 2, 3, 4, 8) if fits(cluster, chips=n, global_batch=n, micro_batch=1, **given))
    assert result.chips.value == result.setting.cluster.num_chips == enough > 1
    assert result.chips.limited_by == "memory"
    assert result.chips.memory_class


def test_a_global_batch_that_is_given_is_divided(cluster):
    result = limits(cluster, global_batch=12, recompute="full")
    assert result.micro_batch.value == max(
        b for b in (1, 2, 3, 4, 6, 12) if fits(cluster, global_batch=12, micro_batch=b, recompute="full")
    )


def test_positions_limit_a_sequence(cluster):
    short = MODEL.having(max_position_embeddings=384)
    for model in (short, short.having(position="learned")):
        limit = limits(cluster, model=model, seq_len=256, tp=1, cp=1, pp=1).seq_len
        assert (limit.value, limit.limited_by) == (384, "positions")
    with pytest.raises(InputError, match="learned positions for 384 tokens only"):
        limits(cluster, model=short.having(position="learned"))


def test_nothing_fits_is_an_answer_too():
    result = perfmodel.find_limits(model="gpt3-175b", cluster="dgx-a100", chips=2, seq_len=2048, tp=2, zero=0, dp=1, pp=1, cp=1)
    assert [limit.value for limit in result] == [0, 0, 0, 0]
    assert result.micro_batch.limited_by == "memory"
    assert "more than the 79.1 GiB" in result.micro_batch.reason


def test_no_number_of_chips_is_enough():
    with pytest.raises(InputError, match=r"chips: no number .* is enough"):
        perfmodel.find_limits(model="gpt3-175b", cluster="dgx-a100", seq_len=2048, tp=1, pp=1, cp=1, zero=0)


@pytest.mark.parametrize("micro_batch", [1, 4, 16, 200])
def test_a_pass_without_needless_plans_finds_what_the_whole_pass_finds(cluster, micro_batch):
    """Plans that surely do not fit and are not the least are left out. Plans that fit, the fastest and the least are the same."""
    setting = make_setting(make_job(MODEL, global_batch=4 * micro_batch, seq_len=1024), cluster, chips=4, calibration="spec-sheet")
    space = replace(space_in(setting, Knobs(micro_batch=micro_batch), {})[0], orders=(DEFAULT_ORDER,))
    complete = sweep(setting.estimator, space, top=1)
    for needless in (float("inf"), float(complete.best.least.values[0])):
        part = sweep(setting.estimator, space, top=1, needless=needless)
        assert part.counts.num_feasible == complete.counts.num_feasible
        assert part.counts.num_evaluated <= complete.counts.num_evaluated
        assert part.best.least.values.tolist() == complete.best.least.values.tolist()
        assert part.plan(int(part.best.least.ids[0])) == complete.plan(int(complete.best.least.ids[0]))
        assert part.best.time.values.tolist() == complete.best.time.values.tolist()
        assert [part.plan(int(i)) for i in part.best.time.ids] == [complete.plan(int(i)) for i in complete.best.time.ids]
    assert part.counts.num_evaluated < complete.counts.num_evaluated or complete.counts.num_feasible


def test_few_single_plans_are_tried(monkeypatch):
    """Memory is nearly linear in the micro-batch and the sequence, so that no bisection is needed."""
    tried = []
    evaluate = limits_of_planner.memories_of_pools
    monkeypatch.setattr(limits_of_planner, "memories_of_pools", lambda *given: tried.append(given) or evaluate(*given))
    result = limits(small(80e9), tp=2, recompute="none", cp=1, pp=1)
    assert result.micro_batch.value > 1000
    assert result.seq_len.value > 1000 * 128
    assert len(tried) <= 40, len(tried)


@pytest.mark.slow
def test_a_loss_in_chunks_is_named_where_it_moves_a_limit():
    job = {"model": "qwen3-8b", "cluster": "dgx-h100", "seq_len": "1M", "profile": "torchtitan"}
    chips = perfmodel.find_limits(**job).chips
    chunked = perfmodel.find_limits(**job, settings={"loss": "chunked"}).chips
    assert chips.reason.endswith(f"; --setting loss=chunked makes it {chunked.value}")
    assert chunked.value < chips.value
    assert "--setting" not in chunked.reason


def test_no_loss_is_named_to_a_framework_that_has_none():
    result = perfmodel.find_limits(model="qwen2.5-0.5b", cluster="dgx-h100", chips=1, seq_len="128k", profile="megatron")
    assert result.micro_batch.memory_moment == "loss"
    assert not any("--setting" in limit.reason for limit in result)


def test_results_print_in_a_few_lines():
    """A notebook prints what a cell returns: no calibration tables and no spans."""
    job = {"model": "gpt2", "cluster": "dgx-h100", "chips": 8, "profile": "megatron"}
    limits = perfmodel.find_limits(**job, seq_len=1024)
    assert [line.split()[0] for line in repr(limits).splitlines()] == ["micro_batch", "global_batch", "seq_len", "chips"]
    plan = perfmodel.predict(**job, global_batch=64, seq_len=1024, pp=2).plan
    assert len(repr(perfmodel.trace_plan(plan))) < 4000
    assert repr(perfmodel.advise(plan)).startswith("Why it takes")
