"""Searches that share the layouts and the memory of a space return what each returns alone, to the bit."""

from dataclasses import replace

import pytest

import perfmodel
from perfmodel.cost.estimate import with_kept_programs
from perfmodel.planner.uniform import kept
from perfmodel.planner.uniform.kept import KeptSpaces
from perfmodel.planner.uniform.space import Space, runnable_space
from perfmodel.planner.uniform.tables import KeptTables
from perfmodel.verbs import points
from perfmodel.workload.layer_specs import Experts
from tests.cost.jobs import CHIP, LLAMA_LIKE, estimator_of, make_job, make_model
from tests.marks import mostly_nightly
from tests.planner.searches import search_plans

DENSE = make_job(make_model(num_hidden_layers=4, vocab_size=30000), batch=16)
EXPERTS = make_job(make_model(**LLAMA_LIKE, num_hidden_layers=2, experts=Experts(num_experts=8, top_k=4, width=256)))


def chips():
    """Chips of which some differ in rates only, and some in the memory that plans may take."""
    memory = CHIP.memory
    for factor in (1.0, 2.0, 0.1):
        yield replace(CHIP, memory=replace(memory, bandwidth=memory.bandwidth * factor, capacity=2e9, usable=2e9))
    yield replace(CHIP, peak_flop_rate={dtype: 3.0 * rate for dtype, rate in CHIP.peak_flop_rate.items()})
    for capacity in (1e9, 2e9):
        yield replace(CHIP, memory=replace(memory, capacity=capacity, usable=capacity))


def outcome(estimator, space, **changes):
    return replace(search_plans(estimator, space, **changes), search_time=0.0)


CASES = [(DENSE, "megatron", (), kept.MOST_KEPT), (DENSE, "megatron", (), 3000), (EXPERTS, "megatron", ("front",), kept.MOST_KEPT)]


@pytest.mark.parametrize(
    ("job", "profile", "also", "most"),
    mostly_nightly([*CASES, (EXPERTS, "megatron", (), kept.MOST_KEPT), (DENSE, "torchtitan", (), kept.MOST_KEPT)], CASES),
)
@pytest.mark.slow
def test_a_search_that_shares_spaces_is_the_same_alone(job, profile, also, most, monkeypatch):
    monkeypatch.setattr(kept, "MOST_KEPT", most)
    spaces = KeptSpaces()
    for chip in chips():
        estimator = with_kept_programs(estimator_of(job, chips=4, node=2, profile=profile, chip=chip))
        space = runnable_space(Space(orders=Space().orders[:2]), estimator.profile, job)
        sharing = outcome(estimator, space, top=3, also=also, kept_tables=KeptTables(spaces=spaces))
        assert sharing == outcome(estimator, space, top=3, also=also)
    if most == kept.MOST_KEPT:
        assert len(spaces.spaces) <= 3


def test_the_fastest_plans_do_not_depend_on_what_else_is_kept():
    estimator = estimator_of(DENSE, chips=4, node=2, chip=next(chips()))
    alone, with_others = (search_plans(estimator, top=10, also=also) for also in ((), ("baselines", "front")))
    assert alone.plans == with_others.plans
    assert (alone.num_evaluated, alone.rejected, alone.least_memory) == (
        with_others.num_evaluated,
        with_others.rejected,
        with_others.least_memory,
    )


@pytest.mark.slow
def test_points_of_several_processes_are_those_of_one(monkeypatch):
    asked = {"model": "gpt2-xl", "cluster": "dgx-a100", "chips": 16, "global_batch": 64, "seq_len": 1024, "profile": "megatron"}
    axes = ["chip.memory.bandwidth=1,2,3TB/s", "network.scale_out.bandwidth=100,200Gbit/s"]
    alone = perfmodel.explore(**asked, vary=axes, search=True)
    monkeypatch.setattr(points, "_ALONE", 0.0)
    assert perfmodel.explore(**asked, vary=axes, search=True).points == alone.points
