"""Casts of weights: what they move, how often, and where a step waits for them."""

import pytest

from perfmodel.parallel.plan import make_plan
from perfmodel.workload.job import Precision
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, profile_of

MODEL = make_model(**LLAMA_LIKE)
LINEAR = sum(shape.num_elements for shape in MODEL.layer_shapes() if len(shape.shape) == 2) * MODEL.num_hidden_layers


def step(precision=Precision.FP8_DELAYED, *, batch=16, profile=None, chips=8, **knobs):
    """A plan's prediction, and the bytes by which its casts show."""
    job = make_job(MODEL, batch=batch, precision=precision)
    estimator = estimator_of(job, chips=chips, profile=profile or "megatron")
    plan = make_plan(job, cluster="test", num_chips=chips, profile=estimator.profile.name, **knobs)
    prediction = estimator.predict(plan)
    return prediction, prediction.parts.get("weight_casts", 0.0) * estimator.machine.memory.bandwidth


@pytest.mark.parametrize("knobs", [dict(tp=2), dict(tp=2, pp=4), dict(pp=2, virtual_stages=4), dict(pp=2, tp=2, zero=1)])
@pytest.mark.parametrize("batch", [16, 48])
def test_weights_that_stay_whole_are_cast_once_a_step_whatever_the_microbatches(knobs, batch):
    """Two bytes read and two copies of one written. The first microbatch meets the casts of all stages, one after another."""
    _, moved = step(batch=batch, **knobs)
    assert moved == pytest.approx(4.0 * LINEAR / knobs.get("tp", 1), rel=1e-9)


@pytest.mark.parametrize(
    "precision, num_bytes",
    [
        (Precision.FP8_CURRENT, 2 * 2 + 2 * 1),
        (Precision.FP8_BLOCK, 2 + 2 * (1 + 4 / 128)),
        (Precision.MXFP8, 2 + 2 * (1 + 1 / 32)),
        (Precision.NVFP4, 2 * 2 + 2 * (1 / 2 + 1 / 16)),
    ],
)
def test_bytes_are_those_of_the_recipe(precision, num_bytes):
    assert step(precision, tp=2)[1] == pytest.approx(num_bytes * LINEAR / 2, rel=1e-9)


@pytest.mark.parametrize("precision, reads", [(Precision.FP8_DELAYED, 1), (Precision.FP8_CURRENT, 2)])
def test_primary_weights_in_8_bits_are_cast_by_who_updates_them_and_turned_by_all(precision, reads):
    """float32 masters: one byte replaces the two that the optimizer's own pass writes; the other order is written after the gather."""
    profile = profile_of("megatron").having(gathers_low_weights=True)
    for pp in (1, 2):
        _, moved = step(precision, profile=profile, zero=1, pp=pp, tp=2)
        updated = LINEAR / 2 / pp / (8 / 2 / pp)
        assert moved == pytest.approx(2.0 * LINEAR / 2 + (4.0 * reads + 1.0 - 2.0) * updated, rel=1e-9)


@pytest.mark.parametrize("zero, stores, num_bytes", [(3, False, (2 + 1) + (2 + 2)), (2, True, 2 + 2), (2, False, 0)])
def test_what_is_gathered_each_microbatch_is_cast_each_time(zero, stores, num_bytes):
    """The copy for forward, then both in backward where weights are gathered again; nothing is left to do once a step. Whole weights
    (ZeRO 2 that stores no shards) are cast once a step."""
    keeps = profile_of("torch-fsdp2").having(keeps_low_copies=True, prefetches_parameters=False, zero2_stores_shards=stores)
    never = keeps.having(keeps_low_copies=False)  # of which casts are work of the passes, and gathers the same
    bandwidth = estimator_of(make_job(MODEL), chips=8).machine.memory.bandwidth
    for batch in (8, 16, 24):
        casts, moved = step(batch=batch, zero=zero, dp_shard=8, profile=keeps)
        plain, _ = step(batch=batch, zero=zero, dp_shard=8, profile=never)
        shown = (casts.parts["parameter_gather"] - plain.parts["parameter_gather"]) * bandwidth
        assert shown == pytest.approx(batch / 8 * num_bytes * LINEAR, rel=1e-9)
        assert moved == pytest.approx(0.0 if num_bytes else 4.0 * LINEAR, rel=1e-9)


def test_nothing_is_cast_in_16_bits():
    prediction, moved = step(Precision.BF16_MIXED, tp=2)
    assert "weight_casts" not in prediction.parts
    assert moved == 0.0
