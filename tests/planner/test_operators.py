"""Per-operator plans that fit: what they hold is what a whole plan holds, and the bound is one."""

import random
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.estimate import evaluate_plan
from perfmodel.cost.memory import static_memory
from perfmodel.errors import InputError
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.plan import make_plan
from perfmodel.planner.operator_memory import fit_operators, fit_tables, state_bytes
from perfmodel.planner.operator_mesh import OperatorMesh
from perfmodel.planner.operator_predict import mesh_of, predict_shardings, predicted_operators
from perfmodel.planner.operators import search_operators, tables_of
from perfmodel.search import eliminate
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model

MESH = OperatorMesh(sizes={"tp_kv": 4, "cp": 2, "dp_shard": 2})
MODELS = {"gpt": {}, "llama": LLAMA_LIKE | {"num_key_value_heads": 4}}
FLASH = AttentionKernel.FLASH


@pytest.fixture(scope="module", params=MODELS)
def fitted(request):
    return estimator_of(make_job(make_model(**MODELS[request.param])))


@pytest.fixture(scope="module")
def tables(fitted):
    return tables_of(fitted, MESH, micro_batch=1, zero=0, attention=FLASH)


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_uniform_plan_holds_what_its_prediction_says(fitted, zero, sequence_parallel):
    plan = make_plan(fitted.job, cluster="test", num_chips=16, profile="megatron", calibration="", tp=4, cp=2, dp_shard=2,
                     zero=zero, sequence_parallel=sequence_parallel)  # fmt: skip
    tables = tables_of(fitted, MESH, micro_batch=1, zero=zero, attention=FLASH)
    choice = tables.space.choice_of(fitted.shardings(plan.rule_set, FLASH))
    held = state_bytes(fitted, tables, zero=zero, attention=FLASH)
    row = evaluate_plan(fitted, plan)
    weights, gradients, optimizer, _ = static_memory(row.terms, row.stages, fitted.sizes, num_replicas=4.0)[0]
    predicted = float(np.sum(weights + gradients + optimizer))
    assert sum(own[i] for own, i in zip(held, choice, strict=True)) == pytest.approx(predicted, rel=1e-12)


def test_a_tighter_limit_costs_time_and_the_bound_holds(fitted, tables):
    held = state_bytes(fitted, tables, zero=0, attention=FLASH)
    free = fit_tables(tables, held, state_limit=1e15)
    assert (free.price, free.gap) == (0.0, 0.0)
    least = sum(own.min() for own in held)
    times = []
    for share in (1.0, 0.8, 0.5, 0.3, 0.2):
        limit = least + share * (free.state_bytes - least)
        found = fit_tables(tables, held, state_limit=limit)
        assert found.state_bytes <= limit
        assert (found.lower_bound, found.gap) == (found.plan.time, 0.0)
        assert free.plan.time <= found.plan.time
        times.append(found.plan.time)
        rng = random.Random(1)
        for _ in range(20):  # no choice that fits lies below the bound
            costs = [np.array([rng.random() for _ in own]) + own / free.state_bytes * rng.choice((0, 30)) for own in held]
            choice = eliminate(costs, tables.edges).choice
            if sum(own[i] for own, i in zip(held, choice, strict=True)) <= limit:
                assert tables.microbatch_time(choice) + tables.parameter_time(choice) >= found.lower_bound * (1 - 1e-12)
    assert times == sorted(times)


def test_what_fits_nowhere_is_refused_with_the_least(fitted):
    with pytest.raises(InputError, match="no choice holds less than"):
        fit_operators(fitted, MESH, state_limit=1e3)


@pytest.mark.parametrize("zero", [0, 3])
def test_shardings_of_a_rule_set_are_predicted_as_its_plan(fitted, zero):
    plan = make_plan(fitted.job, cluster="test", num_chips=16, profile="megatron", calibration="", tp=4, cp=2, dp_shard=2, zero=zero)
    uniform = fitted.predict(plan)
    found = predict_shardings(fitted, plan, fitted.shardings(plan.rule_set, FLASH))
    assert replace(found, plan=plan) == uniform


def test_a_found_plan_is_predicted_whole(fitted):
    plan = make_plan(fitted.job, cluster="test", num_chips=16, profile="megatron", calibration="", tp=4, cp=2, dp_shard=2)
    shardings = search_operators(fitted, MESH).plan.shardings
    prediction = predict_shardings(fitted, plan, shardings)
    assert prediction.plan.rule_set == "per-operator"
    assert sum(prediction.parts.values()) == prediction.step_time
    with pytest.raises(InputError, match="shipped rule set"):
        predict_shardings(fitted, plan, shardings, name="megatron")


def test_reductions_that_show_cost_more(fitted):
    hidden = search_operators(fitted, MESH)
    shown = search_operators(fitted, MESH, least_exposed=1.0)
    assert hidden.plan.parameter_time < shown.plan.parameter_time
    assert hidden.plan.microbatch_time <= shown.plan.microbatch_time
    with pytest.raises(InputError, match="least_exposed=2"):
        search_operators(fitted, MESH, least_exposed=2.0)


def test_predictions_are_ranked_and_hold_the_rule_sets(fitted):
    plan = make_plan(fitted.job, cluster="test", num_chips=16, profile="megatron", calibration="", tp=4, cp=2, dp_shard=2)
    assert mesh_of(plan) == replace(MESH, sizes={"tp_kv": 4, "tp_q": 1, "cp": 2, "dp_shard": 2, "dp_replicate": 1})
    ranked = predicted_operators(fitted, plan)
    assert all(prediction.fits for prediction in ranked)
    assert [p.step_time for p in ranked] == sorted(p.step_time for p in ranked)
    names = {prediction.plan.rule_set for prediction in ranked}
    assert {"megatron (rule set)", "megatron-sp (rule set)"} <= names
    uniform = min(fitted.predict(replace(plan, rule_set=rules)).step_time for rules in ("megatron", "megatron-sp"))
    assert ranked[0].step_time <= uniform * (1 + 1e-12)


@pytest.mark.parametrize("knobs", [{"pp": 2, "dp_shard": 8}, {"recompute": "full", "dp_shard": 16}], ids=str)
def test_what_the_search_does_not_cover_is_refused(fitted, knobs):
    plan = make_plan(fitted.job, cluster="test", num_chips=16, profile="megatron", calibration="", **knobs)
    with pytest.raises(InputError, match=f"{next(iter(knobs))}="):
        predicted_operators(fitted, plan)
