"""Adapters-only training as it is predicted: frozen weights are stored, gathered and multiplied with, and no more."""

from dataclasses import replace

import pytest

from perfmodel.cost.estimate import evaluate_plan
from perfmodel.parallel.algebra.sharding import COMM
from perfmodel.parallel.choices import AttentionKernel, Recompute
from perfmodel.parallel.plan import make_plan
from perfmodel.parallel.plan_file import read_plan, write_plan
from perfmodel.planner.uniform.space import Space
from perfmodel.workload.training import num_trained_parameters, training_of
from tests.cost.jobs import LLAMA_LIKE, PROFILES, estimator_of, make_job, make_model, predict, sweep_all
from tests.laws.test_batch_row_is_single_plan import assert_cells_equal_single_plans
from tests.marks import one_in

MODEL = make_model(**LLAMA_LIKE)
QUANTIZED = 8 * (2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 2048)


def job_of(train, model=MODEL, **changes):
    return replace(make_job(model, **changes), train=training_of(train))


def terms_of(train, **knobs):
    estimator = estimator_of(job_of(train), chips=4, profile="torch-fsdp2")
    return evaluate_plan(estimator, make_plan(estimator.job, cluster="test", num_chips=4, **knobs)).columns


def test_flops_are_those_of_a_hand_count():
    """A token takes 4 FLOP for a frozen weight, 6 for an adapter's; none below the first adapter. Attention is unchanged."""
    job = job_of("lora:4", batch=4)
    estimator = estimator_of(job, chips=1, profile="torch-fsdp2")
    prediction = predict(estimator)
    trained = num_trained_parameters(MODEL, job.train)
    tables = MODEL.num_parameters_non_embedding + MODEL.vocab_size * MODEL.hidden_size - 17 * 512  # norms multiply nothing
    below = 2 * 512 * (512 + 2 * 128) + 3 * 2 * 4 * 512
    attention = 8 * 14 * 8 * 64 * 256 * 0.5  # flash recomputes its scores: seven products of two, below the diagonal
    executed = (4 * tables + 6 * trained - below + attention) * 4 * 256
    assert prediction.hfu * prediction.step_time * prediction.peak_flop_rate == pytest.approx(executed, rel=1e-9)


def test_memory_of_a_frozen_base_is_its_weights_alone():
    """Megatron without ZeRO: bf16 weights; of an adapter's element 2 bytes, 4 of gradients and 12 of Adam."""
    full, lora, qlora = (
        predict(estimator_of(job_of(train), chips=1)).memory for train in ("full", "lora:8:q_proj+v_proj", "qlora:8:q_proj+v_proj")
    )
    base, trained = MODEL.num_parameters, num_trained_parameters(MODEL, training_of("lora:8:q_proj+v_proj"))
    assert (full["weights"], full["optimizer"]) == pytest.approx((2 * base, 12 * base))
    assert (lora["weights"], lora["optimizer"]) == pytest.approx((2 * (base + trained), 12 * trained))
    assert lora["gradients"] == pytest.approx(4 * trained)
    assert qlora["weights"] == pytest.approx(2 * (base - QUANTIZED + trained) + 0.515869140625 * QUANTIZED)
    assert lora["activations"] < full["activations"]


def test_a_frozen_base_is_gathered_and_never_reduced():
    full, lora = (terms_of(train, dp_shard=4, zero=3).plans.terms for train in ("full", "lora:4"))
    layer = lora.program.members.index(max(lora.program.members, key=len))
    assert lora.gather_forward["microbatch"][layer][0] == pytest.approx(full.gather_forward["microbatch"][1][0], rel=0.1)
    of_tables, of_layer = (lora.gather_backward["microbatch"][region][0] for region in (0, layer))
    assert of_layer > 0.0 == of_tables  # nothing there runs backward
    events = zip(lora.program.events.parameter, lora.program.events.itemsize[:, 0], strict=True)
    reduced = {lora.program.parameters[i].name for i, itemsize in events if itemsize == 4.0}
    assert len(reduced) == 28
    assert all("_lora_" in name for name in reduced)
    zero1 = terms_of("lora:4", dp_shard=4, zero=1)
    assert float(zero1.outside_pipeline.optimizer[0]) < 0.1 * float(terms_of("full", dp_shard=4, zero=1).outside_pipeline.optimizer[0])


def test_the_host_launches_kernels_of_adapters_too():
    """Two products, a factor and a sum for each of a layer's seven linear operators; nothing backward below the first adapter."""
    full, lora = (terms_of(train, dp_shard=4, zero=3).plans.micro.launches[:, 0].reshape(-1, 4) for train in ("full", "lora:4"))
    assert lora[2, :3].sum() == pytest.approx(full[1, :3].sum() + 7 * 4)
    assert 0.0 == lora[0, 3] < lora[1, 3] < lora[2, 3]


def test_a_reduction_of_an_input_gradient_is_not_overlapped_by_a_weight_gradient():
    def shown(train):
        estimator = estimator_of(job_of(train), chips=4, profile=estimator_of().profile.having(tp_backward_overlap_fraction=1.0))
        plan = make_plan(estimator.job, cluster="test", num_chips=4, tp=4)
        micro = evaluate_plan(estimator, plan).columns.plans.micro
        return float(micro.communication[COMM.index("input_gradient") :: len(COMM)].sum())

    assert shown("full") > 0.0
    assert shown("lora:4:o_proj+down_proj") == 0.0


@pytest.mark.parametrize("profile", one_in(3, PROFILES))
@pytest.mark.parametrize("train", ["lora:4", "qlora:4:q_proj+down_proj"])
@pytest.mark.slow
def test_every_cell_of_a_search_is_its_prediction(profile, train):
    model = make_model(**(LLAMA_LIKE if train == "lora:4" else {}), num_hidden_layers=5)
    estimator = estimator_of(job_of(train, model, batch=4), chips=4, node=2, profile=profile)
    state = sweep_all(estimator, Space(fixed={"micro_batch": 1}), attention=AttentionKernel.FLASH)
    assert state.counts.num_evaluated == len(state.best.time.ids) > 50
    assert_cells_equal_single_plans(estimator, state, state.best.time.ids.tolist())


@pytest.mark.parametrize("recompute", Recompute)
def test_adapters_take_less_time_and_memory_than_training_all(recompute):
    """Where the chip sets the pace: of a small model the host has more to launch."""
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336}
    model = make_model(**LLAMA_LIKE | sizes)
    for knobs in ({"dp_shard": 4, "zero": 3}, {"tp": 2, "pp": 2}, {"dp_shard": 2, "tp": 2, "zero": 1}):
        full, lora = (
            predict(estimator_of(job_of(train, model, seq_len=2048), chips=4), recompute=str(recompute), **knobs)
            for train in ("full", "lora:4:q_proj")
        )
        assert lora.step_time < 0.9 * full.step_time
        assert lora.memory["total"] < full.memory["total"]


def test_a_file_says_how_a_plan_trains(tmp_path):
    estimator = estimator_of(job_of("qlora:4:q_proj+v_proj"), chips=4)
    plan = make_plan(estimator.job, cluster="test", num_chips=4, tp=2)
    write_plan(plan, tmp_path / "plan.yaml")
    assert "train: qlora:4:q_proj+v_proj" in (tmp_path / "plan.yaml").read_text()
    again = read_plan(tmp_path / "plan.yaml")
    assert again == plan
    assert again.hash() != replace(plan, job=job_of("full")).hash()
    assert estimator.predict(again).step_time == estimator.predict(plan).step_time
