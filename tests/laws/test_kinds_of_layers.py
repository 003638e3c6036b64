"""Layers of several kinds: kinds that are made alike are one kind, and a search sees what a prediction sees."""

from dataclasses import replace
from functools import cache

import pytest

from perfmodel.workload.layer_specs import LatentAttention, LayerSpec
from perfmodel.workload.training import training_of
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, predict, sweep_all
from tests.laws.test_batch_row_is_single_plan import assert_cells_equal_single_plans

LATENT = LatentAttention(query_rank=96, key_value_rank=64, nope_head_dim=32, rope_head_dim=16, value_head_dim=24)
#: Eight layers that are alike: of one kind, of two one after another, of two in turn.
ALIKE = (
    (),
    (LayerSpec(name="first", count=3), LayerSpec(name="layer", count=5)),
    (LayerSpec(name="first", count=2, turn="t"), LayerSpec(name="layer", count=6, turn="t")),
)
#: Dense first, then a plain MLP, attention without one and latent attention in turn.
MIXED = (
    LayerSpec(name="first", count=2),
    LayerSpec(name="mlp_layer", count=2, mixer="none", turn="t"),
    LayerSpec(name="attention_layer", count=1, feed_forward="none", turn="t"),
    LayerSpec(name="layer", count=3, mixer="latent", turn="t"),
)
PLANS = (
    {"dp_shard": 8, "zero": 3},
    {"tp": 2, "cp": 2, "dp_shard": 2, "zero": 1},
    {"pp": 4, "dp_shard": 2, "zero": 1, "recompute": "full"},
    {"pp": 2, "virtual_stages": 2, "schedule": "interleaved", "dp_shard": 4, "zero": 1},
    {"pp": 8, "stage_layers": (0, 2, 1, 1, 1, 1, 1, 1), "zero": 1},
    {"tp": 2, "pp": 2, "dp_shard": 2, "zero": 2, "attention": "unfused", "recompute": "selective"},
)


@cache
def estimator(kinds, profile):
    more = {"latent": LATENT, "num_key_value_heads": 8} if kinds is MIXED else {}
    return estimator_of(make_job(make_model(**(LLAMA_LIKE | {"kinds": kinds} | more)), batch=16), chips=8, node=4, profile=profile)


@pytest.mark.parametrize("knobs", PLANS, ids=lambda knobs: "-".join(map(str, knobs)))
@pytest.mark.parametrize("profile", ["megatron", "torch-fsdp2"])
def test_kinds_that_are_made_alike_are_one_kind(profile, knobs):
    one, *others = (predict(estimator(kinds, profile), **knobs) for kinds in ALIKE)
    for other in others:
        assert other.step_time == pytest.approx(one.step_time, rel=1e-12)
        assert other.hfu == pytest.approx(one.hfu, rel=1e-12)
        assert other.parts == pytest.approx(one.parts, abs=1e-12 * one.step_time)
        assert other.memory == pytest.approx(one.memory, rel=1e-12)


def test_stages_under_zero_3_may_be_predicted_more_memory_than_they_hold():
    """Where a stage ends at a layer of another kind, its neighbours count as resident: an upper bound with gathered weights."""
    one, *others = (predict(estimator(kinds, "megatron"), pp=4, dp_shard=2, zero=3) for kinds in ALIKE)
    assert all(one.memory["total"] <= other.memory["total"] <= 1.05 * one.memory["total"] for other in others)


def test_parameters_are_counted_kind_by_kind():
    mixed = estimator(MIXED, "megatron")
    assert mixed.programs.graph("flash").num_parameters == mixed.job.transformer.num_parameters
    shallow = mixed.job.transformer.with_layers(4)
    assert sum(kind.count for kind in shallow.layer_kinds) == 4


@pytest.mark.parametrize("profile", ["megatron", pytest.param("torch-fsdp2", marks=pytest.mark.slow)])
def test_cells_of_a_search_over_several_kinds(profile):
    state = sweep_all(estimator(MIXED, profile))
    assert len(state.best.time.ids) > 1000
    assert_cells_equal_single_plans(state.estimator, state, state.best.time.ids.tolist()[::211])


def test_adapters_stand_next_to_layers_of_every_kind():
    """Frozen weights need neither gradient nor optimizer state, whatever kinds the layers are of."""
    full = estimator(MIXED, "megatron")
    adapted = estimator_of(replace(full.job, train=training_of("lora:8")), chips=8, node=4, profile="megatron")
    all_weights, few = (predict(variant, dp_replicate=8) for variant in (full, adapted))
    assert few.memory["optimizer"] + few.memory["gradients"] < 0.1 * (all_weights.memory["optimizer"] + all_weights.memory["gradients"])
