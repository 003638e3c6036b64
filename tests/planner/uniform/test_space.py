"""Rules of the space one by one; that together they are the written space is counted in tests/oracles."""

import numpy as np
import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.choices import AttentionKernel, PipelineSchedule, Recompute, module_operators, useful_modules
from perfmodel.parallel.layout import DEFAULT_ORDER, check_order
from perfmodel.parallel.plan import DEFAULT_RECOMPUTE_OPERATORS
from perfmodel.planner.uniform.space import (
    KNOBS,
    LONG_SEQUENCE,
    SEARCHED_ORDERS,
    Space,
    is_canonical_order,
    layout_blocks,
    micro_batches,
    pipeline_groups,
    recompute_choices,
    searched_rules,
    stage_layouts,
    tensor_degrees,
)
from perfmodel.planner.uniform.sweep import sweep
from perfmodel.workload.layer_specs import Experts
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, sweep_all

EVERYTHING = Space()


@pytest.mark.parametrize(
    ("profile", "seq_len", "names"),
    [
        ("hf-trainer", 8192, ["megatron", "megatron-sp"]),
        ("hf-trainer", LONG_SEQUENCE, ["megatron", "megatron-sp", "ulysses"]),
        ("hf-trainer+cp_form=zigzag", LONG_SEQUENCE, ["megatron", "megatron-sp"]),
        ("deepspeed+cp_form=ulysses", 8192, ["ulysses", "megatron-ulysses"]),
        ("megatron", LONG_SEQUENCE, ["megatron", "megatron-sp", "ulysses", "megatron-ulysses"]),
        ("torchtitan", LONG_SEQUENCE, ["megatron", "megatron-sp"]),
        ("generic", LONG_SEQUENCE, ["megatron", "megatron-sp"]),
        ("verl-fsdp", 8192, ["ulysses"]),
    ],
)
def test_rule_sets_of_a_search_are_those_of_the_framework(profile, seq_len, names):
    assert [rules.name for rules in searched_rules(load_profile(profile), seq_len)] == names


def test_a_search_of_long_sequences_finds_ulysses_where_the_framework_has_it():
    job = {"model": "llama-3-8b", "cluster": "dgx-a100", "chips": 32, "global_batch": 32, "seq_len": 65536, "profile": "hf-trainer"}
    best = perfmodel.find_plans(**job).plans[0]
    assert best.plan.rule_set == "ulysses"
    assert not best.not_runnable
    ring = perfmodel.find_plans(**job, cp_form="zigzag").plans[0]
    assert ring.plan.rule_set != "ulysses"
    assert ring.step_time > best.step_time


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

    def choices(pp, space=EVERYTHING):
        return [(c.schedule, c.virtual_stages) for group in pipeline_groups(job, pp, space) for c in group.choices]

    assert choices(1) == [(PipelineSchedule.ONE_F_ONE_B, 1)]
    assert sorted({v for _, v in choices(5)}) == [1, 2]
    assert choices(15) == []
    assert sorted({v for s, v in choices(2) if s is PipelineSchedule.INTERLEAVED}) == [2, 3, 4, 5, 6, 7]
    assert choices(12) == [(PipelineSchedule.GPIPE, 1), (PipelineSchedule.ONE_F_ONE_B, 1)]
    assert choices(2, Space(fixed={"schedule": "gpipe"})) == [(PipelineSchedule.GPIPE, 1)]


@pytest.mark.parametrize("layers", [28, 42, 60, 105, 126])
@pytest.mark.parametrize("ranks", [8, 16])
def test_layers_that_no_power_of_two_divides_have_pipelines(layers, ranks):
    """Ranks differ by a layer, or the ends by one more."""
    groups = pipeline_groups(make_job(make_model(num_hidden_layers=layers, vocab_size=100)), ranks, EVERYTHING)
    splits = [choice.stage_layers for group in groups for choice in group.choices if choice.virtual_stages == 1]
    assert splits
    for split in splits:
        assert sum(split) == layers
        assert max(split[1:-1]) - min(split[1:-1]) <= 1
        assert max(split) - min(split) <= 2


@pytest.mark.parametrize(
    "layers, ranks, virtual, heavy, light",
    [
        (126, 16, 1, [(7, *(8,) * 14, 7)], None),  # Llama 3.1 405B
        (126, 16, 8, [(0, *(1,) * 126, 0)], None),
        (28, 8, 1, [(3, 4, 4, 4, 4, 3, 3, 3), (2, *(4,) * 6, 2)], None),
        (32, 4, 1, [(8, 8, 8, 8), (7, 9, 9, 7)], [(8, 8, 8, 8)]),
        (32, 2, 1, [(16, 16)], None),
        (6, 8, 1, [(0, 1, 1, 1, 1, 1, 1, 0)], None),
        (6, 9, 1, [], None),
    ],
)
def test_layers_of_stages(layers, ranks, virtual, heavy, light):
    """As even as they go; with one layer less at the ends where no rank gets more for it, or the head outweighs a layer."""
    for vocabulary, expected in ((100_000, heavy), (1000, heavy if light is None else light)):
        model = make_model(num_hidden_layers=layers, vocab_size=vocabulary)
        assert stage_layouts(make_job(model), ranks, virtual) == expected


@pytest.mark.slow
def test_lists_of_recomputed_modules_are_among_the_best_where_they_are_quick_enough():
    """As two passes over the whole space would have it, each with its own way to recompute; slow layouts are left out of the second."""
    model = make_model(**LLAMA_LIKE, num_hidden_layers=8, experts=Experts(num_experts=8, top_k=2, width=512))
    (names,) = useful_modules(model)
    assert names == ("layernorm", "moe_act")
    operators = module_operators(names)
    estimator, orders = estimator_of(make_job(model, batch=32, seq_len=4096), chips=16, node=8), SEARCHED_ORDERS[:1]
    quickest = sweep_all(estimator, Space(orders=orders)).best.time.companions[0]
    within = 1.0 - 0.98 * quickest / estimator.machine.memory.usable  # room for a little less
    tried = sweep(estimator, Space(orders=orders, lists=(operators,)), top=50, memory_headroom=within)
    usual = sweep(estimator, Space(orders=orders), top=50, memory_headroom=within)
    asked = Space(orders=orders, recompute_operators=operators, fixed={"recompute": "selective"})
    listed = sweep(estimator, asked, top=50, memory_headroom=within)
    expected = np.sort(np.concatenate([usual.best.time.values, listed.best.time.values]))[:50]
    assert tried.best.time.values.tolist() == expected.tolist()
    plans = [tried.plan(int(i)) for i in tried.best.time.ids]
    assert {plan.recompute_operators for plan in plans if plan.recompute == "selective"} == {operators}
    assert usual.counts.num_evaluated < tried.counts.num_evaluated < usual.counts.num_evaluated + listed.counts.num_evaluated
    for plan, time in zip(plans[:50:7], tried.best.time.values[:50:7], strict=True):
        assert estimator.predict(plan).step_time == time
    assert useful_modules(make_model()) == ()


def plans(space=EVERYTHING, **job):
    state = sweep_all(estimator_of(make_job(**job), chips=8), space)
    return [state.plan(i) for i in state.best.time.ids.tolist()]


def test_zero_stages_in_canonical_form():
    stages = {}
    for plan in plans():
        ways = min(plan.layout.dp_shard, 2), min(plan.layout.cp, 2)
        stages.setdefault(ways, set()).add(int(plan.zero))
    assert stages == {(1, 1): {0}, (1, 2): {0, 1, 2, 3}, (2, 1): {1, 2, 3}, (2, 2): {1, 2, 3}}


def test_sequence_parallelism_needs_tp_and_a_sequence_that_divides():
    choices = {}
    for plan in plans(seq_len=12):
        choices.setdefault((plan.layout.tp, plan.layout.cp), set()).add(plan.sequence_parallel)
    assert choices[1, 1] == {False}
    assert choices[2, 2] == choices[4, 1] == {False, True}
    assert choices[8, 1] == choices[4, 2] == {False}


def test_micro_batches_and_recomputation():
    assert micro_batches(make_job(batch=24), 2, EVERYTHING) == [1, 2, 3, 4, 6, 12]
    assert micro_batches(make_job(batch=24), 2, Space(maximum={"micro_batch": 3})) == [1, 2, 3]
    flash, unfused = (recompute_choices(EVERYTHING, kernel, DEFAULT_RECOMPUTE_OPERATORS) for kernel in AttentionKernel)
    assert flash == [Recompute.NONE, Recompute.FULL]
    assert unfused == recompute_choices(EVERYTHING, AttentionKernel.FLASH, ("mlp_activation",)) == list(Recompute)
    asked = Space(fixed={"recompute": "selective"})
    assert recompute_choices(asked, AttentionKernel.FLASH, DEFAULT_RECOMPUTE_OPERATORS) == [Recompute.SELECTIVE]


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
    for rows in layout_blocks(make_job(), 16, EVERYTHING, AttentionKernel.FLASH):
        assert (rows.pp, rows.data_parallel) not in seen
        seen.add((rows.pp, rows.data_parallel))
        assert (rows.pp * rows.dp_replicate * rows.dp_shard * rows.cp * rows.tp == 16).all()
        assert (rows.dp_replicate * rows.dp_shard == rows.data_parallel).all()
    assert len(seen) > 5


@pytest.mark.parametrize("bounds", ["fixed", "maximum"])
def test_only_knobs_of_the_space(bounds):
    for knob in KNOBS:
        Space(**{bounds: {knob: 1}})
    with pytest.raises(InputError, match="xp: not in the space"):
        Space(**{bounds: {"xp": 2}})
