"""Rules of the space one by one; that together they are the written space is counted in tests/oracles."""

import pytest

from perfmodel.errors import InputError
from perfmodel.parallel.layout import DEFAULT_ORDER, PipelineSchedule, Recompute, check_order
from perfmodel.planner.space import (
    KNOBS,
    SEARCHED_ORDERS,
    Space,
    is_canonical_order,
    layout_blocks,
    micro_batches,
    pipeline_choices,
    recompute_choices,
    tensor_degrees,
)
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, sweep_all

EVERYTHING = Space()


@pytest.mark.parametrize("kv, degrees", [(8, [1, 2, 4, 8]), (2, [1, 2, 4, 8]), (1, [1, 2, 4, 8])])
def test_tensor_degrees(kv, degrees):
    job = make_job(make_model(**LLAMA_LIKE | {"num_key_value_heads": kv}))
    assert tensor_degrees(job, 64, EVERYTHING) == degrees


def test_tensor_degrees_divide_or_are_multiples_of_key_value_heads():
    model = make_model(num_attention_heads=12, num_key_value_heads=4, hidden_size=768, intermediate_size=3072)
    # 3 divides the heads and neither divides 4 nor is a multiple of it; 6 likewise; 12 is a multiple
    assert tensor_degrees(make_job(model), 24, EVERYTHING) == [1, 2, 4, 12]


def test_pipelines():
    job = make_job(make_model(num_hidden_layers=12))
    assert pipeline_choices(job, 1, EVERYTHING) == [(PipelineSchedule.ONE_F_ONE_B, 1)]
    assert pipeline_choices(job, 5, EVERYTHING) == []
    assert [v for s, v in pipeline_choices(job, 2, EVERYTHING) if s is PipelineSchedule.INTERLEAVED] == [2, 3, 6]
    assert [s for s, v in pipeline_choices(job, 12, EVERYTHING)] == [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B]
    assert pipeline_choices(job, 2, Space(fixed={"schedule": "gpipe"})) == [(PipelineSchedule.GPIPE, 1)]


def plans(space=EVERYTHING, **job):
    state = sweep_all(estimator_of(make_job(**job), chips=8), space)
    return [state.plan(i) for i in state.best_time.ids.tolist()]


def test_zero_stages_in_canonical_form():
    found = {}
    for plan in plans():
        ways = min(plan.layout.dp_shard, 2), min(plan.layout.cp, 2)
        found.setdefault(ways, set()).add(int(plan.zero))
    assert found == {(1, 1): {0}, (1, 2): {0, 1, 2, 3}, (2, 1): {1, 2, 3}, (2, 2): {1, 2, 3}}


def test_sequence_parallelism_needs_tp_and_a_sequence_that_divides():
    found = {}
    for plan in plans(seq_len=12):
        found.setdefault((plan.layout.tp, plan.layout.cp), set()).add(plan.sequence_parallel)
    assert found[1, 1] == {False}
    assert found[2, 2] == found[4, 1] == {False, True}
    assert found[8, 1] == found[4, 2] == {False}


def test_micro_batches_and_recomputation():
    assert micro_batches(make_job(batch=24), 2, EVERYTHING) == [1, 2, 3, 4, 6, 12]
    assert micro_batches(make_job(batch=24), 2, Space(maximum={"micro_batch": 3})) == [1, 2, 3]
    assert recompute_choices(EVERYTHING) == list(Recompute)


def test_searched_orders_are_orders_and_begin_with_the_default():
    assert SEARCHED_ORDERS[0] == DEFAULT_ORDER
    assert len(set(SEARCHED_ORDERS)) == len(SEARCHED_ORDERS)
    for order in SEARCHED_ORDERS:
        check_order(order)


def test_an_order_is_canonical_where_none_before_it_says_the_same():
    degrees = dict.fromkeys(DEFAULT_ORDER, 1)
    for one_axis in DEFAULT_ORDER:
        canonical = [is_canonical_order(SEARCHED_ORDERS, i, degrees | {one_axis: 4}) for i in range(len(SEARCHED_ORDERS))]
        assert canonical == [True] + [False] * (len(SEARCHED_ORDERS) - 1)
    everything = dict.fromkeys(DEFAULT_ORDER, 2)
    assert all(is_canonical_order(SEARCHED_ORDERS, i, everything) for i in range(len(SEARCHED_ORDERS)))


def test_blocks_are_of_one_pipeline_and_data_degree():
    seen = set()
    for rows in layout_blocks(make_job(), 16, EVERYTHING):
        assert (rows.pp, rows.data_parallel) not in seen
        seen.add((rows.pp, rows.data_parallel))
        assert (rows.pp * rows.dp_replicate * rows.dp_shard * rows.cp * rows.tp == 16).all()
        assert (rows.dp_replicate * rows.dp_shard == rows.data_parallel).all()
    assert len(seen) > 5


@pytest.mark.parametrize("place", ["fixed", "maximum"])
def test_only_knobs_of_the_space(place):
    for knob in KNOBS:
        Space(**{place: {knob: 1}})
    with pytest.raises(InputError, match="ep: not in the space"):
        Space(**{place: {"ep": 2}})
