"""Loss and every gradient of each form of parallelism equal those of one process."""

from dataclasses import replace
from functools import cache

import pytest

from perfmodel.execute.launch.rank_results import TOLERANCE
from perfmodel.execute.runner import gradient_error
from perfmodel.execute.uniform.gradient_check import check_gradients_on_rank
from perfmodel.foundation.errors import RunError
from perfmodel.parallel.executable import not_modules_reason
from perfmodel.parallel.schedule_table import table_of
from perfmodel.workload.job import Optimizer, Precision
from tests.execute.jobs import GATED, VARIANTS, check_with_lost_norm_gradients, losses_of_steps, tiny, tiny_plan, worst_error
from tests.marks import NIGHTLY, covering, mostly_nightly

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FORMS = {
    "data parallel": (2, dict()),
    "data parallel, accumulated": (2, dict(micro_batch=2)),
    "zero 1": (2, dict(zero=1, micro_batch=2)),
    "zero 2": (2, dict(zero=2, micro_batch=2)),
    "zero 3": (2, dict(zero=3, micro_batch=2)),
    "tensor": (2, dict(tp=2, sequence_parallel=False, micro_batch=4)),
    "tensor and sequence": (2, dict(tp=2, micro_batch=4)),
    "context": (2, dict(cp=2)),
    "context, unfused": (2, dict(cp=2, attention="unfused")),
    "ulysses": (2, dict(cp=2, rules="ulysses")),
    "ulysses, unfused, selective recomputation": (2, dict(cp=2, rules="ulysses", attention="unfused", recompute="selective")),
    "context, zero 1": (2, dict(cp=2, zero=1)),
    "context, zero 3": (2, dict(cp=2, zero=3)),
    "gpipe": (2, dict(pp=2, schedule="gpipe", micro_batch=2)),
    "1f1b": (2, dict(pp=2, micro_batch=2)),
    "1f1b, uneven": (2, dict(pp=2, micro_batch=2, stage_layers=(3, 1))),
    "interleaved": (2, dict(pp=2, virtual_stages=2, micro_batch=2)),
    "zero-bubble": (2, dict(pp=2, schedule="zero-bubble", micro_batch=2)),
    "zero-bubble, chunks": (2, dict(pp=2, schedule="zero-bubble", virtual_stages=2, micro_batch=2)),
    "selective recomputation": (2, dict(recompute="selective")),
    "full recomputation": (2, dict(recompute="full")),
    "zero 3, full recomputation": (2, dict(zero=3, recompute="full")),
    "tensor and sequence, full recomputation": (2, dict(tp=2, recompute="full", micro_batch=4)),
    "tensor, selective recomputation": (2, dict(tp=2, sequence_parallel=False, recompute="selective", micro_batch=4)),
    "hsdp": (4, dict(dp_replicate=2, dp_shard=2, zero=3)),
    "hybrid zero 1": (4, dict(dp_replicate=2, dp_shard=2, zero=1)),
    "zero 2 x context": (4, dict(dp_shard=2, cp=2, zero=2)),
    "zero 3 x tensor": (4, dict(dp_shard=2, zero=3, tp=2, sequence_parallel=False, micro_batch=2)),
    "zero 3 x tensor and sequence": (4, dict(dp_shard=2, zero=3, tp=2, micro_batch=2)),
    "zero 1 x tensor and sequence": (4, dict(dp_shard=2, zero=1, tp=2, micro_batch=2)),
    "data x tensor and sequence": (4, dict(dp_replicate=2, tp=2, micro_batch=2)),
    "context x tensor and sequence": (4, dict(cp=2, tp=2, micro_batch=4)),
    "ulysses x tensor and sequence": (4, dict(cp=2, tp=2, rules="megatron-ulysses", micro_batch=4)),
    "tensor 4": (4, dict(tp=4, micro_batch=4)),
    "context 4": (4, dict(cp=4, micro_batch=4)),
    "pipeline 4, uneven, head alone": (4, dict(pp=4, stage_layers=(2, 1, 1, 0))),
    "pipeline x zero 1": (4, dict(pp=2, dp_shard=2, zero=1)),
    "pipeline x zero 2": (4, dict(pp=2, dp_shard=2, zero=2)),
    "pipeline x zero 3": (4, dict(pp=2, dp_shard=2, zero=3)),
    "interleaved x zero 3": (4, dict(pp=2, virtual_stages=2, dp_shard=2, zero=3)),
    "pipeline x context": (4, dict(pp=2, cp=2)),
    "zero-bubble x tensor and sequence": (4, dict(pp=2, schedule="zero-bubble", tp=2)),
    "zero-bubble x zero 3": (4, dict(pp=2, schedule="zero-bubble", dp_shard=2, zero=3)),
    "zero-bubble x zero 1": (4, dict(pp=2, schedule="zero-bubble", dp_shard=2, zero=1)),
    "shards inside context": (4, dict(cp=2, zero=3, order=("tp", "dp_shard", "dp_replicate", "cp", "pp"))),
    "pipeline innermost": (4, dict(pp=2, tp=2, order=("pp", "cp", "dp_shard", "dp_replicate", "tp"))),
    "pipeline x zero 3 x tensor and sequence": (8, dict(pp=2, dp_shard=2, tp=2, zero=3)),
    "data x context x tensor and sequence": (8, dict(dp_replicate=2, cp=2, tp=2, micro_batch=2)),
    "pipeline x context x tensor and sequence": (8, dict(pp=2, cp=2, tp=2, micro_batch=2)),
    "hsdp x tensor and sequence": (8, dict(dp_replicate=2, dp_shard=2, tp=2, zero=3)),
}


#: Forms by the number of ranks, so that a group of processes serves all of its size one after the other.
BOTH = [(form, variant) for form, (ranks, _) in FORMS.items() for variant in ("qwen3", "gpt2")[: 1 if ranks == 8 else 2]]
#: In `make test`: each knob and each pair of knobs that up to four ranks show, of qwen3; of gpt2 the forms that its layers change.
KEPT = [(form, "qwen3") for form in covering({form: of for form, of in FORMS.items() if of[0] < 8}, cost=lambda of: of[0])]
KEPT += [(form, "qwen3") for form in ("data parallel, accumulated", "zero 3", "tensor and sequence", "1f1b", "interleaved", "zero-bubble")]
KEPT += [(form, "gpt2") for form in ("zero 3", "tensor", "tensor and sequence", "context, unfused", "interleaved")]


@pytest.mark.parametrize("form, variant", mostly_nightly(BOTH, KEPT), ids=[f"{form}-{variant}" for form, variant in BOTH])
def test_gradients_equal_those_of_one_process(form, variant, groups):
    num_ranks, knobs = FORMS[form]
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny(variant), **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    checked = {name for errors in results for name in errors} - {"loss", "lm_head.weight"}
    assert checked == {shape.name for shape in tiny(variant).parameter_shapes()}


#: Two ranks and four micro-batches: whole, split and paired backward passes, in a loop and in a V.
IN_TURN = ["0F0,0F1,0F2,0B0,0F3,0I1,0B2,0W1,0I3,0W3", "1F0,1I0,1F1,1B1,1W0,1F2,1B2,1F3,1B3"]
IN_A_V = [
    "0F0,0F1,3F0,3I0,3W0,3F1,0F2,0I0,0W0,3B1,3F2,(0F3;3B2)OVERLAP_F_B,0B1,3F3,3B3,0B2,0B3",
    "1F0,2F0,1F1,2F1,2B0,1B0,1F2,2F2,2I1,2W1,1B1,(1F3;2B2)OVERLAP_F_B,2F3,1B2,2B3,1B3",
]

#: Schedules in a V and from files, of a model whose ends share no matrix: in a V both are on the first rank.
V_FORMS = {
    "file": (2, dict(pp=2, schedule=table_of("mine", IN_TURN, where="file"), micro_batch=2)),
    "file, in a v": (2, dict(pp=2, schedule=table_of("mine", IN_A_V, where="file"), micro_batch=2)),
    "zbv": (2, dict(pp=2, schedule="zbv", micro_batch=2)),
    "zbv, few micro-batches, uneven": (2, dict(pp=2, schedule="zbv", micro_batch=4, stage_layers=(0, 2, 1, 1))),
    "dualpipev": (2, dict(pp=2, schedule="dualpipev")),
    "zbv x zero 3": (4, dict(pp=2, schedule="zbv", dp_shard=2, zero=3)),
    "zbv x zero 1": (4, dict(pp=2, schedule="zbv", dp_shard=2, zero=1)),
    "dualpipev x tensor and sequence": (4, dict(pp=2, schedule="dualpipev", tp=2)),
}


@pytest.mark.parametrize("form", mostly_nightly(V_FORMS, ("file, in a v", "zbv", "dualpipev", "zbv x zero 3")))
def test_gradients_of_orders_equal_those_of_one_process(form, groups):
    num_ranks, knobs = V_FORMS[form]
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny("llama"), **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    assert {name for errors in results for name in errors} - {"loss"} == {shape.name for shape in tiny("llama").parameter_shapes()}


#: A table that both stages of the first rank read.
SHARED_FORMS = {
    "zbv": (2, "qwen3", dict(pp=2, schedule="zbv", micro_batch=2)),
    "dualpipev": (2, "gpt2", dict(pp=2, schedule="dualpipev")),
    "file, in a v": (2, "qwen3", dict(pp=2, schedule=table_of("mine", IN_A_V, where="file"), micro_batch=2)),
    "zbv x zero 1": (4, "gpt2", dict(pp=2, schedule="zbv", dp_shard=2, zero=1)),
    "dualpipev x tensor and sequence": (4, "qwen3", dict(pp=2, schedule="dualpipev", tp=2)),
}


@pytest.mark.parametrize("form", mostly_nightly(SHARED_FORMS, ("zbv", "dualpipev")))
def test_gradients_of_ends_on_one_rank_equal_those_of_one_process(form, groups):
    num_ranks, variant, knobs = SHARED_FORMS[form]
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny(variant), **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    checked = {name for errors in results for name in errors} - {"loss"}
    assert checked == {shape.name for shape in tiny(variant).parameter_shapes()}


#: Models with experts: each mesh of experts combined with each of attention's axes.
EXPERT_FORMS = {
    "every expert everywhere, zero 3": (2, dict(zero=3)),
    "over context": (2, dict(cp=2, ep=2)),
    "over tensor": (2, dict(tp=2, ep=2, etp=1, micro_batch=4)),
    "zero 3, one copy of each": (2, dict(ep=2, zero=3)),
    "gathered": (2, dict(ep=2, dispatcher="allgather", micro_batch=2)),
    "gathered, over tensor and context": (4, dict(ep=4, tp=2, cp=2, etp=1, micro_batch=4, zero=1, dispatcher="allgather")),
    "once to each rank": (2, dict(ep=2, dispatcher="flex", micro_batch=2)),
    "once to each rank, over tensor and context": (4, dict(ep=4, tp=2, cp=2, etp=1, micro_batch=4, zero=1, dispatcher="flex")),
    "once to each rank, tensor in both": (4, dict(ep=2, tp=2, etp=2, micro_batch=2, dispatcher="flex")),
    "once to each rank, hsdp": (4, dict(ep=2, dp_replicate=2, dp_shard=2, zero=3, dispatcher="flex")),
    "once to each rank, pipeline, full recomputation": (4, dict(ep=2, pp=2, micro_batch=2, zero=3, recompute="full", dispatcher="flex")),
    "zero 1": (4, dict(ep=2, zero=1, micro_batch=2)),
    "zero 3": (4, dict(ep=2, zero=3, micro_batch=2)),
    "hsdp": (4, dict(ep=2, dp_replicate=2, dp_shard=2, zero=3)),
    "pipeline x zero 3, full recomputation": (4, dict(ep=2, pp=2, micro_batch=2, zero=3, recompute="full")),
    "tensor in both x zero 1": (4, dict(ep=2, tp=2, etp=2, micro_batch=2, zero=1)),
    "tensor and data x zero 3": (4, dict(ep=4, tp=2, etp=1, micro_batch=2, zero=3)),
    "over tensor, copies over context": (4, dict(ep=2, tp=2, cp=2, etp=1, micro_batch=4, zero=1)),
}


#: In `make test`: each knob and each pair of knobs.
KEPT_EXPERTS = {*covering(EXPERT_FORMS), "zero 3, one copy of each", "over tensor"}


@pytest.mark.parametrize("form", mostly_nightly(EXPERT_FORMS, KEPT_EXPERTS))
def test_gradients_of_experts_equal_those_of_one_process(form, groups):
    num_ranks, knobs = EXPERT_FORMS[form]
    for variant in ("mixtral", "shared experts", "deepseek") if {"tp", "cp"}.isdisjoint(knobs) else ("mixtral", "shared experts"):
        results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny(variant), **knobs))
        name, error = worst_error(results)
        assert error < TOLERANCE, f"{variant}: {name}"
        assert {name for errors in results for name in errors} >= {shape.name for shape in tiny(variant).parameter_shapes()}


#: Of models whose experts have biases, with sinks of attention and windows.
BIASED_FORMS = {
    "zero 3": (2, dict(ep=2, zero=3)),
    "over tensor": (2, dict(tp=2, ep=2, etp=1, micro_batch=4)),
    "context, selective recomputation": (2, dict(cp=2, recompute="selective")),
    "over tensor and context x zero 1": (4, dict(ep=4, tp=2, cp=2, etp=1, micro_batch=4, zero=1)),
    "pipeline x zero 3, full recomputation": (4, dict(ep=2, pp=2, micro_batch=2, zero=3, recompute="full")),
}


@pytest.mark.parametrize("form", BIASED_FORMS)
def test_gradients_of_biases_and_sinks_equal_those_of_one_process(form, groups):
    num_ranks, knobs = BIASED_FORMS[form]
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny("gpt-oss"), **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    assert {name for errors in results for name in errors} >= {shape.name for shape in tiny("gpt-oss").parameter_shapes()}


#: Models with latent attention, with experts and without.
LATENT_FORMS = {
    "tensor": (2, "latent", dict(tp=2, sequence_parallel=False, micro_batch=4)),
    "context x zero 3": (2, "latent", dict(cp=2, zero=3)),
    "over tensor": (2, "deepseek", dict(tp=2, ep=2, etp=1, micro_batch=4)),
    "ulysses": (2, "deepseek", dict(cp=2, ep=2, rules="ulysses")),
    "over tensor, copies over context": (4, "deepseek", dict(ep=2, tp=2, cp=2, etp=1, micro_batch=4, zero=1)),
    "over tensor x zero 3, full recomputation": (4, "deepseek", dict(ep=4, tp=2, etp=1, micro_batch=2, zero=3, recompute="full")),
}


@pytest.mark.parametrize("form", LATENT_FORMS)
def test_gradients_of_latent_attention_equal_those_of_one_process(form, groups):
    num_ranks, variant, knobs = LATENT_FORMS[form]
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny(variant), **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    assert {name for errors in results for name in errors} >= {shape.name for shape in tiny(variant).parameter_shapes()}


#: Of models whose latent attention is to keys that an indexer chooses, which learns by a loss of its own.
SPARSE_FORMS = {
    "zero 3": (2, "glm-5", dict(ep=2, zero=3)),
    "tensor": (2, "sparse", dict(tp=2, sequence_parallel=False, micro_batch=4)),
    "over tensor": (2, "glm-5", dict(tp=2, ep=2, etp=1, micro_batch=4)),
    "pipeline, full recomputation": (2, "glm-5", dict(pp=2, micro_batch=2, recompute="full")),
    "over tensor x zero 1": (4, "glm-5", dict(dp_shard=2, tp=2, ep=2, etp=1, micro_batch=2, zero=1)),
}


@pytest.mark.parametrize("form", SPARSE_FORMS)
def test_gradients_of_sparse_attention_equal_those_of_one_process(form, groups):
    num_ranks, variant, knobs = SPARSE_FORMS[form]
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny(variant), **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    assert {name for errors in results for name in errors} >= {shape.name for shape in tiny(variant).parameter_shapes()}


#: Models with a state in the place of keys in some layers, with experts and without.
STATE_FORMS = {
    "zero 3": (2, "qwen3-next", dict(ep=2, zero=3)),
    "over tensor": (2, "qwen3-next", dict(tp=2, ep=2, etp=1, micro_batch=4)),
    "pipeline, full recomputation": (2, "qwen3-next", dict(pp=2, micro_batch=2, recompute="full")),
    "over tensor x zero 1": (2, "nemotron", dict(tp=2, ep=2, etp=1, zero=1, micro_batch=4)),
    "pipeline, a short last chunk": (2, "nemotron", dict(pp=2, micro_batch=2, seq_len=29)),
    "tensor": (2, "hybrid", dict(tp=2, sequence_parallel=False, micro_batch=4)),
    "pipeline x over tensor": (4, "qwen3-next", dict(pp=2, tp=2, ep=2, etp=1, micro_batch=2)),
}


@pytest.mark.parametrize("form", STATE_FORMS)
def test_gradients_of_mixers_with_a_state_equal_those_of_one_process(form, groups):
    num_ranks, variant, knobs = STATE_FORMS[form]
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=tiny(variant), **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    assert {name for errors in results for name in errors} >= {shape.name for shape in tiny(variant).parameter_shapes()}


#: Of models whose head predicts further tokens.
FURTHER_FORMS = {
    "context": (2, "mixtral", dict(cp=2, ep=2)),
    "pipeline": (2, "mixtral", dict(pp=2, micro_batch=2)),
    "pipeline x zero 1": (4, "deepseek", dict(pp=2, ep=2, zero=1, micro_batch=2)),
    "interleaved x zero 3": (4, "deepseek", dict(pp=2, virtual_stages=2, ep=2, zero=3, micro_batch=2)),
    "tensor and data x zero 3": (4, "mixtral", dict(ep=4, tp=2, etp=1, micro_batch=2, zero=3)),
}


@pytest.mark.parametrize("form", FURTHER_FORMS)
def test_gradients_of_further_tokens_equal_those_of_one_process(form, groups):
    num_ranks, variant, knobs = FURTHER_FORMS[form]
    model = tiny(f"{variant}, further tokens")
    results = groups(num_ranks).call(check_gradients_on_rank, tiny_plan(num_ranks, model=model, **knobs))
    name, error = worst_error(results)
    assert error < TOLERANCE, name
    further = {f"mtp{depth}.{shape.name}" for depth in range(2) for shape in model.mtp_shapes()}
    assert {name for errors in results for name in errors} >= {shape.name for shape in model.parameter_shapes()} | further


CUTS = {"tp+sp": dict(tp=2), "tp": dict(tp=2, sequence_parallel=False), "cp": dict(cp=2), "ulysses": dict(cp=2, rules="ulysses")}
ARCHITECTURES = (*VARIANTS, *GATED)
#: In `make test`: each architecture over tensors with sequence parallelism and over the sequence.
KEPT_CUTS = [(cut, variant) for cut in ("tp+sp", "cp") for variant in ARCHITECTURES] + [("tp", "gpt2"), ("ulysses", "gemma2")]


@pytest.mark.parametrize("cut, variant", mostly_nightly([(cut, variant) for cut in CUTS for variant in ARCHITECTURES], KEPT_CUTS))
def test_every_architecture_is_cut_right(variant, cut, groups):
    plan = tiny_plan(2, model=tiny(variant), batch=2, **CUTS[cut])
    if variant == "olmo2" and plan.layout.tp > 1:
        assert not_modules_reason(plan).startswith("tp=2: a norm over all heads")
        plan = replace(plan, job=replace(plan.job, model=plan.job.model.having(qk_norm=False)))
    name, error = worst_error(groups(2).call(check_gradients_on_rank, plan))
    assert error < TOLERANCE, name


def test_the_check_finds_a_gradient_that_was_not_reduced(groups):
    """Without their all-reduce the norm weights' gradients are partial sums: the loss is right, the gradients are not."""
    results = groups(2).call(check_with_lost_norm_gradients, tiny_plan(2, tp=2))
    assert max(errors["loss"] for errors in results) < 1e-6
    assert worst_error(results)[1] > 0.1
    with pytest.raises(RunError, match="norm"):
        gradient_error(results)


def test_the_gate_refuses_nan():
    with pytest.raises(RunError, match="x differs"):
        gradient_error([{"x": float("nan"), "y": 0.0}, {"x": 0.0}])


TRAINED = {
    "zero 1": dict(zero=1, micro_batch=2),
    "zero 3": dict(zero=3, micro_batch=2),
    "tensor and sequence": dict(tp=2, micro_batch=4),
    "interleaved": dict(pp=2, virtual_stages=2, micro_batch=2),
}


@pytest.fixture(scope="package")
def losses(groups):
    """Losses of the first steps of a plan on two ranks, run once for all tests that compare with it."""

    @cache
    def run(plan, steps):
        return [sum(shares) for shares in zip(*groups(2).call(losses_of_steps, plan, steps), strict=True)]

    return run


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, pytest.param(Optimizer.MOMENTUM, marks=NIGHTLY)])
@pytest.mark.parametrize("form", TRAINED)
def test_training_follows_data_parallel_training(form, optimizer, losses):
    """The optimizer's shards and the published weights: losses of later steps depend on both."""
    options = dict(model=tiny("gpt2"), optimizer=optimizer)
    expected, trained = losses(tiny_plan(2, **options), 4), losses(tiny_plan(2, **options, **TRAINED[form]), 4)
    assert trained == pytest.approx(expected, rel=2e-5)
    assert expected[3] < expected[0]


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, pytest.param(Precision.BF16, marks=NIGHTLY)])
@pytest.mark.parametrize("form", ["data parallel", *TRAINED, "context"])
def test_bf16_training_stays_near_fp32(form, precision, losses):
    knobs = {**TRAINED, "data parallel": {}, "context": dict(cp=2)}[form]
    expected, trained = losses(tiny_plan(2), 3), losses(tiny_plan(2, precision=precision, **knobs), 3)
    # pure bf16 has no finer copy of the weights: its first updates are mostly rounded away
    assert trained == pytest.approx(expected, rel=1e-2 if precision is Precision.BF16_MIXED else 4e-2)
