"""The per-operator search prices a plan as the cost model of whole plans does, and its optimum is never worse than a rule set.

Times agree to 1e-12: the search adds up by vertices and edges, a whole plan by regions and kinds of work, so the last digits differ.
"""

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.cost.estimate import evaluate_plan
from perfmodel.cost.step import phase_times
from perfmodel.errors import InputError
from perfmodel.parallel.layout import AttentionKernel
from perfmodel.parallel.plan import make_plan
from perfmodel.planner import operator_tables as module
from perfmodel.planner.operator_mesh import OperatorMesh
from perfmodel.planner.operators import derived_microbatch_time, search_operators, tables_of
from perfmodel.search import eliminate
from tests.cost.jobs import LLAMA_LIKE, PROFILES, estimator_of, make_job, make_model

MODELS = {
    "gpt": {},
    "llama": LLAMA_LIKE | {"num_key_value_heads": 4},
    "parallel block": {"parallel_block": True, "shared_norm": True, "attention_output_bias": False, "position": "rotary"},
    "parallel block, biases, two norms": {"parallel_block": True, "qkv_bias": False},
    "norms after, norms of heads": LLAMA_LIKE | {"num_key_value_heads": 4, "sandwich_norm": True, "qk_norm": True},
    "norms after alone": LLAMA_LIKE | {"sandwich_norm": True, "pre_norm": False},
    "norms with a weight for each head": LLAMA_LIKE | {"num_key_value_heads": 4, "qk_norm": True, "qk_norm_scope": "own"},
    "gated with biases": LLAMA_LIKE | {"num_key_value_heads": 4, "mlp_bias": True, "qkv_bias": True, "tie_word_embeddings": True},
}
MESH = OperatorMesh(sizes={"cp": 2, "tp_kv": 4, "dp_shard": 2})
WIDE = OperatorMesh(sizes={"cp": 2, "tp_kv": 2, "tp_q": 2})


def estimator(model, profile="megatron", **changes):
    return estimator_of(make_job(make_model(**MODELS[model])), profile=profile, **changes)


def random_choice(tables, rng):
    """A choice that is possible, and the layouts of shared tensors that its readers leave."""
    costs = [np.array([rng.random() for _ in cost]) for cost in tables.vertex_costs]
    edges = [(u, v, np.where(np.isinf(matrix), np.inf, 0.0)) for u, v, matrix in tables.edges]
    return tables.space.choice_of(tables.space.shardings(eliminate(costs, edges).choice))


def assert_law(fitted, tables, choice, mesh, **settings):
    derived = derived_microbatch_time(fitted, tables.space.shardings(choice), mesh, **settings)
    assert tables.microbatch_time(choice) == pytest.approx(derived, rel=1e-12)


def uniform_time(row, profile):
    """Forward, backward and communication of one microbatch of a plan: embedding, all layers, head."""
    once = [sum(float(value[0]) for value in phase_times(row.micro, profile, region).values()) for region in range(3)]
    return once[0] + row.program.graph.num_layers * once[1] + once[2]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("model", MODELS)
def test_any_choice_costs_what_its_derived_program_costs(model, profile):
    rng = random.Random(f"{model} {profile}")
    fitted = estimator(model, profile)
    for attention in AttentionKernel:
        tables = tables_of(fitted, MESH, micro_batch=4, zero=0, attention=attention)
        for _ in range(4):
            assert_law(fitted, tables, random_choice(tables, rng), MESH, micro_batch=4, attention=attention)


@pytest.mark.parametrize("model", ["llama", "gated with biases"])
def test_any_choice_on_three_axes(model):
    rng = random.Random(model)
    fitted = estimator(model)
    tables = tables_of(fitted, WIDE, micro_batch=1, zero=0, attention=AttentionKernel.FLASH)
    for _ in range(20):
        assert_law(fitted, tables, random_choice(tables, rng), WIDE, micro_batch=1)


@pytest.mark.parametrize(
    ("model", "sizes", "sequence_parallel"),
    [
        *itertools.product(
            ["gpt", "llama", "parallel block, biases, two norms"], [{"tp": 4}, {"tp": 2, "cp": 4}, {"tp": 8}], [False, True]
        ),
        ("llama", {"cp": 2}, False),
    ],
    ids=str,
)
def test_megatron_is_a_choice_and_costs_the_uniform_plan(model, sizes, sequence_parallel):
    """The whole line of `predict`: nodes of four chips, so that tensor groups of eight cross them.

    A rule set does not know that an axis has one rank: it adds the bias of a row-parallel product after the reduction all the same. The
    space leaves such axes out, and the product adds its bias itself. So without tp the two agree only where there is no such bias.
    """
    fitted = estimator(model)
    plan = make_plan(fitted.job, cluster="test", num_chips=16, profile="megatron", calibration="", micro_batch=2,
                     sequence_parallel=sequence_parallel, **sizes)  # fmt: skip
    tp = plan.layout.tp
    tp_kv = math.gcd(tp, fitted.job.model.num_key_value_heads)
    mesh = OperatorMesh(sizes={"tp_kv": tp_kv, "tp_q": tp // tp_kv, "cp": plan.layout.cp, "dp_replicate": plan.layout.dp_replicate})
    tables = tables_of(fitted, mesh, micro_batch=2, zero=0, attention=AttentionKernel.FLASH)
    choice = tables.space.choice_of(fitted.shardings(plan.rule_set, AttentionKernel.FLASH))
    uniform = uniform_time(evaluate_plan(fitted, plan), fitted.profile)
    assert tables.microbatch_time(choice) == pytest.approx(uniform, rel=1e-12)


@pytest.mark.parametrize("profile", ["megatron", "torch-fsdp2"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("zero", [0, 3])
def test_the_optimum_is_never_worse_than_a_rule_set(model, profile, zero):
    found = search_operators(estimator(model, profile), MESH, micro_batch=2, zero=zero)
    assert found.solution.is_proved
    # without a norm before them projections read the residual stream itself: Megatron's cut between the two is then no choice of this space
    expected = {"ddp"} if model == "norms after alone" else {"ddp", "megatron", "megatron-sp"}
    assert {plan.name for plan in found.rule_sets} >= expected
    assert all(found.plan.time <= plan.time * (1 + 1e-12) for plan in found.rule_sets)
    derived = derived_microbatch_time(estimator(model, profile), found.plan.shardings, MESH, micro_batch=2)
    assert derived <= found.plan.microbatch_time * (1 + 1e-12)


def test_one_chip_sends_nothing():
    mesh = OperatorMesh(sizes={})
    found = search_operators(estimator("llama"), mesh)
    assert {plan.time for plan in found.rule_sets} == {found.plan.time}
    assert found.plan.parameter_time == 0
    assert all((matrix[np.isfinite(matrix)] == 0).all() for _, _, matrix in found.tables.edges)


def test_a_place_matters():
    """The same cuts, with the axis that the tensors travel on inside the node and across nodes."""
    fitted = estimator("llama")
    shardings = fitted.shardings("megatron", AttentionKernel.FLASH)
    times = []
    for order in (("tp_q", "tp_kv", "cp", "dp_shard", "dp_replicate"), ("dp_replicate", "dp_shard", "cp", "tp_q", "tp_kv")):
        mesh = OperatorMesh(sizes={"tp_kv": 4, "dp_shard": 4}, order=order)
        tables = tables_of(fitted, mesh, micro_batch=1, zero=0, attention=AttentionKernel.FLASH)
        times.append(tables.microbatch_time(tables.space.choice_of(shardings)))
    assert times[0] < times[1]


def test_a_wrong_price_is_found(monkeypatch):
    """Gradients of several readers reduced apart, not joined: the law above must fail."""
    monkeypatch.setattr(module, "join_gradients", lambda gradients: list(gradients) * 2)
    fitted = estimator("gpt")
    tables = tables_of(fitted, MESH, micro_batch=1, zero=0, attention=AttentionKernel.FLASH)
    choice = tables.space.choice_of(fitted.shardings("megatron", AttentionKernel.FLASH))
    derived = derived_microbatch_time(fitted, tables.space.shardings(choice), MESH)
    assert tables.microbatch_time(choice) > derived * (1 + 1e-6)


def test_shardings_outside_the_space_are_refused():
    fitted = estimator("gpt")
    tables = tables_of(fitted, MESH, micro_batch=1, zero=0, attention=AttentionKernel.FLASH)
    shardings = dict(fitted.shardings("megatron", AttentionKernel.FLASH))
    shardings["block_output"] = {"b": ("dp_replicate", "dp_shard"), "h": ("cp",)}
    with pytest.raises(InputError, match="is not in the space"):
        tables.space.choice_of(shardings)


def test_a_mesh_that_is_none_is_refused():
    with pytest.raises(InputError, match="is not a fine axis"):
        OperatorMesh(sizes={"tp": 2})
    with pytest.raises(InputError, match="at least 1"):
        OperatorMesh(sizes={"cp": 0})
    with pytest.raises(InputError, match="each fine axis once"):
        replace(MESH, order=("cp", "tp_kv"))
    with pytest.raises(InputError, match="global_batch=16"):
        tables_of(estimator("gpt"), MESH, micro_batch=5, zero=0, attention=AttentionKernel.FLASH)
