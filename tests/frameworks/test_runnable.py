"""Plans that a framework can run: the data of its profile, the sentence about a plan, and the part of the space that is left."""

from dataclasses import replace

import pytest

from perfmodel.foundation.errors import InputError
from perfmodel.foundation.schema import check
from perfmodel.frameworks.options import HEAD_TAIL
from perfmodel.frameworks.profile import GENERIC, list_profiles, load_profile
from perfmodel.frameworks.runnable import ANYTHING, not_runnable_reason
from perfmodel.frameworks.schemas import runs_model
from perfmodel.parallel.algebra.rules import RuleSet, load_rule_set
from perfmodel.parallel.choices import AttentionKernel, Dispatcher
from perfmodel.parallel.executable import not_executable_reason
from perfmodel.parallel.plan import make_plan
from perfmodel.planner.uniform.space import LONG_SEQUENCE, Space, runnable_space, searched_rules
from perfmodel.workload.job import TrainingJob
from perfmodel.workload.layer_specs import Experts
from perfmodel.workload.models import load_model
from perfmodel.workload.training import training_of
from tests.cost.jobs import LLAMA_LIKE, estimator_of, make_job, make_model, predict, sweep_all

GIVEN = {
    "zero": [0, 1], "zero_in_pipeline": [0], "zero_of_replicas": [], "axes": ["tp"], "schedules": ["1f1b"], "recompute": ["none"],
    "sequence_parallel": True, "uneven_stages": False, "few_microbatches": True, "source": "a page",
}  # fmt: skip

#: Shards over cp alone.
REPLICAS = {"dp_replicate": 4, "dp_shard": 1, "zero": 3}


@pytest.mark.parametrize("name", sorted(set(list_profiles()) - {"torch-gloo", "xla", GENERIC}))
def test_shipped_frameworks_say_what_they_run_and_where_that_stands(name):
    runs = load_profile(name).runs
    assert runs != ANYTHING
    assert len(runs.source) > 30
    assert 0 in runs.sharding.zero
    assert set(runs.sharding.zero_in_pipeline) <= set(runs.sharding.zero)


@pytest.mark.parametrize(
    ("profile", "knobs", "reason"),
    [
        ("megatron", {"dp_shard": 16}, "zero=3: megatron has ZeRO 0 and 1 only"),
        ("megatron", {"pp": 2, "schedule": "gpipe"}, "schedule=gpipe: megatron has 1f1b and interleaved only"),
        ("megatron", {"dp_shard": 16, "zero": 1}, ""),
        ("deepspeed", {"dp_shard": 8, "pp": 2, "zero": 2}, "zero=2: deepspeed has ZeRO 0 and 1 only with a pipeline"),
        ("deepspeed", {"dp_shard": 16, "zero": 2}, ""),
        ("nanotron", {"cp": 2}, "cp=2: nanotron has no cp"),
        ("nanotron", {"dp_replicate": 4, "dp_shard": 4, "zero": 1}, "shards ZeRO 1 over all data ranks only"),
        ("composer-fsdp", {"tp": 2}, "tp=2: composer-fsdp has no tp"),
        ("llm-c", {"recompute": "full"}, "recompute=full: llm-c has recompute none only"),
        ("torchtitan", {"pp": 8, "micro_batch": 2}, "pp=8: torchtitan needs at least pp=8 microbatches, not 4"),
        ("torchtitan", {"dp_shard": 16, "zero": 1}, "zero=1: torchtitan has ZeRO 0, 2 and 3 only"),
        ("torch-gloo", {"pp": 2, "schedule": "gpipe"}, ""),
        ("hf-trainer", {"pp": 2}, "pp=2: hf-trainer has no pp"),
        ("hf-trainer", {"tp": 2, "sequence_parallel": False}, "zero=0: hf-trainer has ZeRO 2 and 3 only with tp=2"),
        ("hf-trainer", {"tp": 2, "dp_shard": 8, "sequence_parallel": False}, ""),
        ("hf-trainer", {"tp": 2, "dp_shard": 8, "sequence_parallel": True}, "hf-trainer has no sequence parallelism"),
        ("llama-factory", {"tp": 2}, "tp=2: llama-factory has no tp"),
        ("llama-factory", {"dp_shard": 16}, ""),
        ("unsloth", {"dp_shard": 16}, "zero=3: unsloth has ZeRO 0 only"),
        ("verl-fsdp", {"tp": 2}, "tp=2: verl-fsdp has no tp"),
        ("verl-fsdp", {"cp": 2, "dp_shard": 8, "rules": "ulysses"}, ""),
        ("verl-megatron", {"dp_shard": 16}, "zero=3: verl-megatron has ZeRO 0 and 1 only"),
        ("hf-trainer", REPLICAS | {"cp": 4}, "hf-trainer combines replicas with cp=4 only if dp_shard is above 1"),
        ("hf-trainer", {"cp": 16, "zero": 3}, ""),
        ("hf-trainer", {"cp": 2, "dp_shard": 8, "rules": "ulysses"}, ""),
        ("hf-trainer", {"cp": 2, "dp_shard": 4, "dp_replicate": 2}, ""),
        (
            "hf-trainer", {"cp": 2, "dp_shard": 4, "dp_replicate": 2, "rules": "ulysses"},
            "hf-trainer cuts operators as one of megatron does if dp_replicate and dp_shard are above 1",
        ),
        ("nemo-automodel", {"pp": 2, "dp_shard": 8, "schedule": "gpipe"}, "schedule=gpipe: nemo-automodel has 1f1b and interleaved only"),
        ("nemo-automodel", {"pp": 2}, "zero=0: nemo-automodel has ZeRO 2 and 3 only with pp=2"),
        ("nemo-automodel", REPLICAS | {"cp": 4}, "nemo-automodel combines replicas with cp=4 only if dp_shard is above 1"),
    ],
)  # fmt: skip
def test_what_a_framework_cannot_run_has_a_sentence(profile, knobs, reason):
    refusal = predict(estimator_of(profile=profile), **knobs).not_runnable
    assert refusal.endswith(reason)
    assert bool(refusal) == bool(reason)


def test_a_library_for_rows_in_copies_is_of_a_framework_and_of_chips():
    model = make_model(**LLAMA_LIKE, experts=Experts(num_experts=8, top_k=2, width=256))
    flex = {"dp_replicate": 16, "ep": 8, "dispatcher": "flex"}
    assert predict(estimator_of(make_job(model), profile="nanotron"), **flex).not_runnable.endswith("sends rows once to each place")
    assert not predict(estimator_of(make_job(model), profile="megatron"), **flex).not_runnable
    tried = {
        (name, chip): load_profile(name).runs.dispatchers(chip) for name in ("megatron", GENERIC) for chip in ("h100-sxm-80gb", "tpu-v5p")
    }
    assert [target for target, dispatchers in tried.items() if Dispatcher.FLEX in dispatchers] == [("megatron", "h100-sxm-80gb")]
    with pytest.raises(InputError, match=r"runs.flex='h100': must be a list"):
        check_runs(GIVEN | {"flex": "h100"})


def check_runs(data):
    return check(runs_model(), data, where="mine.yaml", within="runs")


def test_a_ring_that_is_balanced_halves_the_chunks():
    job = make_job(make_model(**LLAMA_LIKE), seq_len=258)
    assert "2 cp equal chunks, and 4 does not divide 258" in predict(estimator_of(job), cp=2).not_runnable


@pytest.mark.parametrize("profile", ["megatron", "deepspeed", "nanotron", "torchtitan", "composer-fsdp", "llm-c", "hf-trainer"])
@pytest.mark.slow
def test_the_space_of_a_framework_is_what_it_runs(profile):
    """The search evaluates exactly the plans of the unrestricted space that have no reason against them."""
    estimator = estimator_of(make_job(make_model(num_hidden_layers=6), batch=8), chips=8, profile=profile)
    behaviours = estimator.profile
    space = Space(orders=Space().orders[:1], rules=searched_rules(behaviours, LONG_SEQUENCE if profile == "hf-trainer" else 0))
    all_plans, some = (
        sweep_all(estimator, searched, attention=AttentionKernel.UNFUSED)
        for searched in (space, replace(space, runs=behaviours.runs, balanced_context=behaviours.communication.context_chunks == HEAD_TAIL))
    )
    expected = {plan for plan in map(all_plans.plan, all_plans.best.time.ids.tolist()) if not not_runnable_reason(plan, behaviours)}
    plans = [some.plan(i) for i in some.best.time.ids.tolist()]
    assert len(plans) == some.counts.num_evaluated == len(expected)
    assert set(plans) == expected


@pytest.mark.parametrize("name", ["megatron", "megatron-sp"])
def test_rules_of_single_operators_stay_where_the_framework_cuts_so(name):
    """A rule set written out for every operator is as runnable as the rule set, and adds no plan to it."""
    estimator = estimator_of(make_job(make_model(num_hidden_layers=2), batch=8), chips=8)
    rules, attention = load_rule_set(name), AttentionKernel.FLASH
    operators = {
        op.name: {dim: rules.cut(op.name, dim) for dim in map(op.logical_name, op.dims)}
        for op in estimator.programs.graph(attention).operators
    }
    written = RuleSet(name="mine", source="", rules={"batch": rules.rules["batch"]}, operators=operators)
    space = Space(orders=Space().orders[:1], runs=estimator.profile.runs, rules=(rules,))
    expected = sweep_all(estimator, space, attention=attention).counts.num_evaluated
    assert expected > 0
    for sets in ((written,), (rules, written)):
        assert sweep_all(estimator, replace(space, rules=sets), attention=attention).counts.num_evaluated == expected
    whole_ffn = replace(rules, name="whole-ffn", operators={"down_proj": {"ffn": ()}, "activation": {"ffn": ()}, "up_proj": {"ffn": ()}})
    assert sweep_all(estimator, replace(space, rules=(whole_ffn,)), attention=attention).counts.num_evaluated < expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"zero": [0, 4]}, r"runs\.zero\.1=4: must be one of 0, 1, 2, 3"),
        ({"axes": "tp"}, r"runs\.axes='tp': must be a list"),
        ({"sequence_parallel": "yes"}, "must be true or false"),
        ({"zeros": [0]}, "unknown field; did you mean 'zero'"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    assert check_runs(GIVEN)["schedules"] == ["1f1b"]
    with pytest.raises(InputError, match=message):
        check_runs(GIVEN | change)


def test_stages_that_must_be_even():
    plan = predict(estimator_of(make_job(make_model(num_hidden_layers=9))), pp=2, dp_shard=8, zero=1).plan
    runs = ANYTHING.having(uneven_stages=False)
    assert (
        not_runnable_reason(plan, replace(load_profile("generic"), name="it", runs=runs))
        == "pp=2: it needs the same number of layers in every stage"
    )


@pytest.mark.parametrize(
    ("profile", "train", "zero", "reason"),
    [
        ("llama-factory", "qlora:4", 3, ""),
        ("llama-factory", "qlora:4:all-linear:int8", 1, ""),
        (
            "llama-factory",
            "qlora:4:all-linear:int8",
            3,
            "llama-factory cannot shard a base in int8, of which every data rank has a whole copy",
        ),
        ("llama-factory", "lora:4", 3, ""),
        ("hf-trainer", "qlora:4:all-linear:int4", 3, "hf-trainer cannot shard a base in int4, of which every data rank has a whole copy"),
    ],
)
def test_which_quantised_bases_can_be_sharded_is_the_frameworks(profile, train, zero, reason):
    job = replace(make_job(make_model(**LLAMA_LIKE)), train=training_of(train))
    refusal = predict(estimator_of(job, profile=profile), dp_shard=16, zero=zero).not_runnable
    assert refusal.endswith(reason) if reason else refusal == ""
    stages = runnable_space(Space(), load_profile(profile), job).runs.sharding.zero
    assert (zero in stages) is (reason == "")


@pytest.mark.parametrize(
    ("profile", "has_context"),
    [("llama-factory", False), ("unsloth", False), ("deepspeed", True), ("internevo", True), ("hf-trainer", True)],
)
def test_a_stated_context_form_is_run_by_frameworks_that_have_it(profile, has_context):
    runs = load_profile(f"{profile}+cp_form=ulysses").runs
    assert ("cp" in runs.axes) is has_context
    assert "cp" not in load_profile("deepspeed+cp_form=zigzag").runs.axes


@pytest.mark.parametrize("batch, virtual_stages, rule", [(22, 1, "= 2 as microbatches, not 11"), (20, 1, ""), (20, 2, "")])
def test_torch_runs_zero_bubble_in_full_rounds(batch, virtual_stages, rule):
    plan = make_plan(
        TrainingJob(model=load_model("llama-3-8b"), global_batch=batch, seq_len=2048), cluster="dgx-h100", num_chips=8, pp=4, zero=2,
        schedule="zero-bubble", virtual_stages=virtual_stages,
    )  # fmt: skip
    reason = not_runnable_reason(plan, load_profile("torchtitan"))
    assert reason.endswith(rule)
    assert bool(reason) == bool(rule)
    assert bool(not_executable_reason(plan)) == bool(rule)


def test_several_virtual_stages_need_full_rounds_of_microbatches():
    job = TrainingJob(model=load_model("llama-3-8b"), global_batch=22, seq_len=2048)
    with pytest.raises(InputError, match=r"must be a multiple of the number of rounds, max\(1, 11 // pp=4\) = 2; change micro_batch"):
        make_plan(job, cluster="dgx-h100", num_chips=8, pp=4, zero=2, schedule="zero-bubble", virtual_stages=2)
