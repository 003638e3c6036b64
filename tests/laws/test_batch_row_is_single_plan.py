"""A plan costs the same alone and among a million, to the last bit: the search and the prediction run the same formulas."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.cost.estimate import evaluate_plan
from perfmodel.hardware.calibration import SPEC_SHEET
from perfmodel.hardware.fabric import Topology
from perfmodel.hardware.reader import load_calibration, load_cluster
from perfmodel.parallel.choices import AttentionKernel, Dispatcher
from perfmodel.parallel.layout import DEFAULT_ORDER
from perfmodel.planner.uniform.space import Space
from perfmodel.workload.job import Optimizer, Precision
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.training import training_of
from tests.cost.jobs import LLAMA_LIKE, PROFILES, estimator_of, make_job, make_model, profile_of, sweep_all
from tests.cost.machines import make_tier
from tests.marks import mostly_slow


def assert_cells_equal_single_plans(estimator, state, ids):
    """Step time and memory of these ids, as the sweep has them and as a single prediction has them, whose verdicts a few plans show."""
    times = dict(zip(state.best.time.ids.tolist(), state.best.time.values.tolist(), strict=True))
    memory = dict(zip(state.best.memory.ids.tolist(), state.best.memory.values.tolist(), strict=True))
    for number, plan_id in enumerate(ids):
        plan = state.plan(plan_id)
        row = evaluate_plan(estimator, plan)
        assert times[plan_id] == row.step_time, plan
        assert memory[plan_id] == max(row.memory_row.total), plan
        if number % 8 == 0:
            prediction = estimator.predict(plan)
            assert (prediction.step_time, prediction.memory["total"]) == (times[plan_id], memory[plan_id])


models = st.builds(
    lambda layers, heads, kv, head_dim, wide, vocab, tied, llama: make_model(
        **((LLAMA_LIKE if llama else {})
        | {
            "num_hidden_layers": layers,
            "hidden_size": heads * head_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": kv if heads % kv == 0 else heads,
            "head_dim": head_dim,
            "intermediate_size": wide,
            "vocab_size": vocab,
            "tie_word_embeddings": tied,
        })
    ),
    st.sampled_from([2, 5, 6, 7, 8, 11, 12]),
    st.sampled_from([4, 6, 8, 16]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([32, 64]),
    st.sampled_from([512, 768, 1536]),
    st.integers(100, 60000),
    st.booleans(),
    st.booleans(),
)  # fmt: skip
jobs = st.builds(
    lambda model, batch, seq_len, precision, optimizer, train: replace(
        make_job(model, batch=batch, seq_len=seq_len, precision=precision, optimizer=optimizer), train=training_of(train)
    ),
    models,
    st.sampled_from([4, 6, 8, 16, 24]),
    st.sampled_from([64, 96, 128, 512]),
    st.sampled_from(Precision),
    st.sampled_from(Optimizer),
    st.sampled_from(["full", "full", "lora:4", "qlora:2:o_proj+up_proj", "dora:4", "galore:4"]),
)


sweeps = given(job=jobs, profile=st.sampled_from(PROFILES), attention=st.sampled_from(AttentionKernel), shape=st.data())


@pytest.mark.slow
@sweeps
@settings(max_examples=8)
def test_random_cells_of_random_sweeps(job, profile, attention, shape):
    check_random_cells(job, profile, attention, shape)


@pytest.mark.slow
@pytest.mark.nightly
@sweeps
@settings(max_examples=60)
def test_random_cells_of_further_sweeps(job, profile, attention, shape):
    check_random_cells(job, profile, attention, shape)


def check_random_cells(job, profile, attention, shape):
    node = shape.draw(st.sampled_from([1, 2, 4]), label="chips of a node")
    chips = node * shape.draw(st.sampled_from([1, 2, 4, 6]), label="nodes")
    topology = shape.draw(st.sampled_from([Topology.SWITCH, Topology.FULL_MESH, Topology.PCIE_TREE]))
    estimator = estimator_of(job, chips=chips, profile=profile, tiers=_tiers(topology, node))
    state = sweep_all(estimator, attention=attention)
    if len(state.best.time.ids):
        ids = shape.draw(st.lists(st.sampled_from(state.best.time.ids.tolist()), min_size=15, max_size=15), label="ids")
        assert_cells_equal_single_plans(estimator, state, ids)


def _tiers(topology, node):
    outer = make_tier(Topology.FAT_TREE, size=4096 * node, bandwidth=25e9, latency=5e-6)
    return (
        (make_tier(topology, size=node, peer_to_peer=topology is not Topology.PCIE_TREE), outer) if node > 1 else (make_tier(size=1), outer)
    )


@pytest.mark.parametrize("changes", [{}, {"gathers_low_weights": True}])
@pytest.mark.parametrize("name", ["megatron", "torch-fsdp2"])
def test_every_cell_of_a_small_sweep_whose_weights_are_cast(name, changes):
    """Once a step of whole weights, each microbatch of those that are gathered, with what the optimizer casts."""
    profile = profile_of(name).having(keeps_low_copies=True, **changes)
    job = make_job(make_model(**LLAMA_LIKE, num_hidden_layers=4), batch=8, precision=Precision.FP8_CURRENT)
    estimator = estimator_of(job, chips=4, node=2, profile=profile)
    state = sweep_all(estimator)
    assert {state.plan(i).zero for i in state.best.time.ids.tolist()} >= {0, 1, 3} - ({3} if name == "megatron" else {1})
    assert_cells_equal_single_plans(estimator, state, state.best.time.ids.tolist()[::5])


@pytest.mark.parametrize("delays", [False, True])
@pytest.mark.slow
def test_every_cell_of_a_small_sweep_whose_exchanges_hide(delays):
    """Exchanges overlapped by another microbatch's passes, with ends of their own, and with delayed weight gradients."""
    experts = Experts(num_experts=8, top_k=2, width=256, shared_width=512, shared_gate=True)
    model = make_model(**LLAMA_LIKE, num_hidden_layers=4, experts=experts)
    profile = profile_of("megatron").having(hides_exchanges=True, delays_weight_gradients=delays)
    estimator = estimator_of(make_job(model, batch=8), chips=8, node=4, profile=profile)
    state = sweep_all(estimator, Space(orders=(DEFAULT_ORDER,)))
    ids = state.best.time.ids.tolist()[::29]
    assert {(plan.layout.pp > 1, plan.ep > 1) for plan in map(state.plan, ids)} == {(a, b) for a in (True, False) for b in (True, False)}
    assert_cells_equal_single_plans(estimator, state, ids)


@pytest.mark.parametrize("profile", ["torch-fsdp2", "megatron"])
def test_every_cell_of_a_small_sweep_that_postpones_gradients_of_weights(profile):
    estimator = estimator_of(make_job(make_model(num_hidden_layers=6), batch=16), chips=4, node=2, profile=profile)
    state = sweep_all(estimator, Space(orders=(DEFAULT_ORDER,), fixed={"schedule": "zero-bubble"}))
    plans = [state.plan(i) for i in state.best.time.ids.tolist()]
    assert {(plan.layout.pp, plan.virtual_stages) for plan in plans} == {(2, 1), (2, 2), (2, 3), (2, 4), (4, 1), (4, 2)}
    assert {str(plan.recompute) for plan in plans} == {"none"}
    assert_cells_equal_single_plans(estimator, state, state.best.time.ids.tolist())


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("profile", ["torch-fsdp2", "megatron"])
def test_every_cell_of_a_small_sweep_in_a_v(profile, schedule):
    model = make_model(num_hidden_layers=7, tie_word_embeddings=profile == "megatron")
    estimator = estimator_of(make_job(model, batch=16), chips=4, node=2, profile=profile)
    state = sweep_all(estimator, Space(orders=(DEFAULT_ORDER,), fixed={"schedule": schedule}))
    plans = [state.plan(i) for i in state.best.time.ids.tolist()]
    assert {(plan.layout.pp, plan.virtual_stages) for plan in plans} == {(2, 2), (4, 2)}
    assert min(plan.num_microbatches // plan.layout.pp for plan in plans) == (2 if schedule == "dualpipev" else 0)
    assert_cells_equal_single_plans(estimator, state, state.best.time.ids.tolist())


@pytest.mark.slow
def test_every_cell_of_a_small_sweep_of_experts():
    experts = Experts(num_experts=8, top_k=2, width=256, shared_width=512, shared_gate=True)
    model = make_model(**LLAMA_LIKE, num_hidden_layers=2, experts=experts)
    space = Space(orders=(DEFAULT_ORDER,), dispatchers=tuple(Dispatcher))
    state = sweep_all(estimator := estimator_of(make_job(model, batch=8), chips=8, node=4), space)
    ids = state.best.time.ids.tolist()[::29]
    plans = [state.plan(i) for i in ids]
    assert {plan.ep for plan in plans} == {1, 2, 4, 8}
    assert {plan.etp for plan in plans} == {1, 2, 4, 8}
    assert {str(plan.dispatcher) for plan in plans if plan.ep > 1} == {"flex", "allgather"}
    assert_cells_equal_single_plans(estimator, state, ids)


@pytest.mark.parametrize("profile", mostly_slow(PROFILES))
@pytest.mark.slow
def test_every_cell_of_a_small_sweep(profile):
    estimator = estimator_of(make_job(make_model(num_hidden_layers=9), batch=4), chips=4, node=2, profile=profile)
    state = sweep_all(estimator, Space(orders=(DEFAULT_ORDER, ("dp_shard", "pp", "tp", "cp", "dp_replicate"))))
    assert state.counts.num_evaluated == len(state.best.time.ids) > 500
    assert_cells_equal_single_plans(estimator, state, state.best.time.ids.tolist()[:: 1 if profile == PROFILES[0] else 7])


@pytest.mark.slow
@pytest.mark.parametrize("cluster, calibration", [("dgx-a100", "a100"), ("dgx-h100", "h100"), ("gb200-nvl72", ""), ("tpu-v5p", "")])
def test_cells_on_shipped_clusters(cluster, calibration):
    from perfmodel.cost.resolve import resolve_estimator
    from perfmodel.frameworks.profile import load_profile
    from perfmodel.workload.models import load_model

    job = make_job(load_model("megatron-1.7b"), batch=48, seq_len=1024)
    where = load_cluster(cluster).with_chips(16)
    overlay = load_calibration(calibration) if calibration else SPEC_SHEET
    estimator = resolve_estimator(job, where, calibration=overlay, profile=load_profile("megatron"))
    state = sweep_all(estimator)
    ids = np.random.default_rng(7).choice(state.best.time.ids, size=60, replace=False)
    assert_cells_equal_single_plans(estimator, state, ids.tolist())


def test_a_pipeline_that_does_not_divide_the_layers_is_found():
    """Llama 3.1 405B has 126 layers: 16 ranks of 7 virtual stages hold one or two layers each, 7 on the first and the last rank."""
    from perfmodel.cost.resolve import resolve_estimator
    from perfmodel.frameworks.profile import load_profile
    from perfmodel.parallel.plan import make_plan
    from perfmodel.workload.models import load_model

    job = make_job(load_model("llama-3.1-405b"), batch=512, seq_len=8192)
    estimator = resolve_estimator(
        job, load_cluster("dgx-h100").with_chips(1024), calibration=load_calibration("h100"), profile=load_profile("megatron")
    )
    knobs = {"tp": 8, "pp": 16, "virtual_stages": 7, "zero": 1, "recompute": "full", "dp_shard": 8, "micro_batch": 1}
    state = sweep_all(estimator, Space(fixed=knobs))
    plans = [state.plan(i) for i in state.best.time.ids.tolist()]
    named = {"cluster": "dgx-h100", "num_chips": 1024, "calibration": estimator.machine.basis.calibration}
    single = make_plan(job, profile="megatron", **named, **knobs)
    assert single in plans
    assert sum(single.stage_layers[::16]) == sum(single.stage_layers[15::16]) == 7
    assert_cells_equal_single_plans(estimator, state, state.best.time.ids.tolist())
