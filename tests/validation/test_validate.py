import csv
import gzip
import io
import json
import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.frameworks.settings import with_settings
from perfmodel.parallel.choices import module_operators
from perfmodel.parallel.stage_cuts import stage_layers_by_cost
from perfmodel.validation.case_plan import plan_of_case
from perfmodel.validation.cases import NOT_INPUTS, inputs_of, parse_case, read_cases
from perfmodel.validation.framework_patterns import framework_of, stage_layers_with_ends
from perfmodel.validation.judgement import is_judged, summarise
from perfmodel.validation.rows import COLUMNS
from perfmodel.validation.validate import CasePredictor, validate_cases
from tests.validation.published_cases import MODEL, write

CASE = {
    "id": "some-run",
    "source": "a paper",
    "source_ref": "table 1",
    "framework": "nanotron v0.5",
    "model": MODEL,
    "sequence_length": 4096,
    "chip": "h100-sxm-80gb",
    "chips_per_node": 8,
    "num_chips": 64,
    "inter_node_gbit_per_s_per_node": 3200,
    "precision": "bf16",
    "global_batch": 128,
    "micro_batch": 1,
    "dp": 8,
    "tp": 4,
    "pp": 2,
    "virtual_stages": 1,
    "cp": 1,
    "ep": None,
    "sequence_parallel": True,
    "zero_stage": 1,
    "distributed_optimizer": None,
    "recompute": "none",
    "flash_attention": True,
    "settings": {"fp32_gradient_accumulation": True, "gradient_bucket_mb": 25.0},
    "measured": {"step_time_s": 2.5, "tokens_per_s_per_chip": None, "peak_memory_gib": 50.0},
    "inferred": [],
    "notes": "",
    "tier": "primary",
}
INPUTS = sorted(set(CASE) - set(NOT_INPUTS))


PREDICTOR = CasePredictor()


def row_of(case, predictor=PREDICTOR):
    return predictor.row(parse_case(json.dumps(case), 1))


def changed(**values):
    return {**CASE, **values}


def without(*names):
    return {name: value for name, value in CASE.items() if name not in names}


# --- what may enter a prediction ----------------------------------------------------------------------------------


def test_inputs_hold_no_measurement_of_and_no_remark_on_the_run():
    assert set(inputs_of(CASE)) == set(INPUTS)
    assert set(parse_case(json.dumps(CASE), 1).inputs) & set(NOT_INPUTS) == set()


@pytest.mark.parametrize("name", NOT_INPUTS)
@pytest.mark.slow
def test_a_field_that_is_no_input_changes_no_prediction(name):
    base = row_of(CASE)
    for value in (None, "out_of_memory", 7, {"step_time_s": 99.0, "peak_memory_gib": 1.0, "mfu": 0.9}, ["a"], "recompute=full"):
        row = row_of(changed(**{name: value}))
        assert (row.predicted_step_time, row.predicted["memory"], row.predicted_fits) == (
            base.predicted_step_time,
            base.predicted["memory"],
            base.predicted_fits,
        )
    row = row_of(without(name))
    assert row.predicted_step_time == base.predicted_step_time


def test_measured_values_may_be_permuted_among_the_cases(tmp_path):
    cases = [changed(id=f"r{i}", micro_batch=m, measured={"step_time_s": 1.0 + i}) for i, m in enumerate((1, 2, 4, 8))]
    shuffled = [{**case, "measured": other["measured"]} for case, other in zip(cases, random.Random(3).sample(cases, 4), strict=True)]
    bare = [{k: v for k, v in case.items() if k != "measured"} for case in cases]
    results = [validate_cases(write(tmp_path / f"{i}.jsonl", part)) for i, part in enumerate((cases, shuffled, bare))]
    predictions = [[(row.predicted_step_time, row.predicted["memory"], row.predicted_fits) for row in result.rows] for result in results]
    assert predictions[0] == predictions[1] == predictions[2]


def test_a_case_alone_is_predicted_as_among_others():
    predictor = CasePredictor()
    cases = [changed(tp=tp, dp=32 // tp, global_batch=batch, zero_stage=z) for tp in (1, 2, 4) for batch in (128, 256) for z in (0, 1)]
    together = [row_of(case, predictor) for case in cases]
    assert [row.predicted_step_time for row in together] == [row_of(case, CasePredictor()).predicted_step_time for case in cases]


# --- models with experts ------------------------------------------------------------------------------------------

WITH_EXPERTS = changed(
    framework="Megatron-Bridge 26.04",
    model={**MODEL, "name": "ours", "kind": "moe", "num_experts": 8, "num_experts_per_tok": 2},
    tp=1, pp=4, dp=16, ep=8,
    sequence_parallel=None,
)  # fmt: skip


def test_experts_are_sharded_as_the_run_states():
    plan = plan_of_case(inputs_of(WITH_EXPERTS)).plan
    assert (plan.ep, plan.etp, plan.dispatcher, plan.job.transformer.parts.experts.top_k) == (8, 1, "alltoall", 2)
    flags = {"megatron_args": ["expert-model-parallel-size=8", "expert-tensor-parallel-size=2", "moe-token-dispatcher-type=allgather"]}
    expert_plan = plan_of_case(inputs_of({**WITH_EXPERTS, "tp": 2, "dp": 8, "ep": 4, "settings": flags})).plan
    assert (expert_plan.ep, expert_plan.etp, expert_plan.dispatcher) == (4, 2, "allgather")
    megatron = plan_of_case(inputs_of({**WITH_EXPERTS, "framework": "Megatron-LM dev", "tp": 2, "dp": 8, "ep": 4})).plan
    assert megatron.etp == 2  # as attention, where it is not given


def test_an_optimizer_that_is_not_modelled_is_reported():
    row = row_of({**WITH_EXPERTS, "settings": {"megatron_args": ["optimizer=muon"]}})
    assert row.reason == "optimizer=muon: is not modelled; give runs with adam"


def test_flags_of_megatron_say_stages_what_runs_again_and_over_how_many_ranks_state_is_cut():
    flags = [
        "pipeline-model-parallel-layout=Et*3|(t|)*14tmL", "recompute-modules=[layernorm moe_act]", "use-distributed-optimizer=True",
        "num-distributed-optimizer-instances=2",
    ]  # fmt: skip
    model = {**WITH_EXPERTS["model"], "num_hidden_layers": 18}
    stated = {**WITH_EXPERTS, "model": model, "recompute": "selective", "zero_stage": None, "settings": {"megatron_args": flags}}
    plan = plan_of_case(inputs_of({**stated, "framework": "Megatron-LM dev", "global_batch": 64})).plan
    assert plan.stage_layers == (3, *(1,) * 15)
    assert (plan.virtual_stages, plan.layout.dp_shard, plan.layout.dp_replicate, plan.zero) == (4, 8, 2, 1)
    assert plan.recompute_operators == module_operators(["layernorm", "moe_act"])
    wrong = row_of({**stated, "settings": {"megatron_args": ["pipeline-model-parallel-layout=Ex|tL"]}})
    assert wrong.reason == "pipeline-model-parallel-layout=Ex|tL: must be of E, t, m, L and |; correct it in the case"
    offloads = row_of({**WITH_EXPERTS, "model": {**model, "name": "fine_grained_offloading"}})
    assert "moves activations to the host, which is not modelled" in offloads.reason


def test_recipes_of_a_chip_say_how_tokens_reach_experts():
    nvl72, hopper = (plan_of_case(inputs_of({**WITH_EXPERTS, "chip": chip})) for chip in ("gb200-nvl72", "h100-sxm-80gb"))
    assert (nvl72.plan.dispatcher, hopper.plan.dispatcher) == ("flex", "alltoall")
    assert (nvl72.profile.kernels.graph_scope, hopper.profile.kernels.graph_scope) == (("attn", "moe_router", "moe_preprocess"), ())
    unknown = {**WITH_EXPERTS, "framework": "Megatron-Bridge"}  # no release: what its recipes usually do on the chip
    nvl72, hopper = (plan_of_case(inputs_of({**unknown, "chip": chip})) for chip in ("gb200-nvl72", "h100-sxm-80gb"))
    assert (nvl72.plan.dispatcher, hopper.plan.dispatcher) == ("flex", "alltoall")
    assert (
        nvl72.profile.timing.host_launch_time < hopper.profile.timing.host_launch_time == load_profile("megatron").timing.host_launch_time
    )
    assert (nvl72.profile.exchanges.hides_exchanges, hopper.profile.exchanges.hides_exchanges) == (
        False,
        False,
    )  # a pipeline without interleaving
    assert plan_of_case(inputs_of({**unknown, "virtual_stages": 2})).profile.exchanges.hides_exchanges


def test_chips_that_experts_cannot_be_sharded_over_are_reported():
    row = row_of({**WITH_EXPERTS, "num_chips": 8, "dp": 2, "pp": 4})
    assert row.reason == "num_chips=8: must be a multiple of pp*etp*ep=32, over which the experts are distributed; correct it in the case"


def test_runs_with_experts_are_counted_apart_and_the_fastest_release_of_a_setting_counts():
    measured = {"step_time_s": 3.0, "peak_memory_gib": 9.0}
    slow = {**WITH_EXPERTS, "id": "some-slow", "framework": "Megatron-Bridge 26.02", "measured": measured}
    rows = [row_of(case) for case in (CASE, slow, WITH_EXPERTS)]
    result, dense = summarise(rows, by=("chip",)), summarise(rows[:1], by=("chip",))
    for figures in ("overall", "by", "sources", "scored", "memories", "fits", "choices"):
        assert repr(getattr(result, figures)) == repr(getattr(dense, figures))
    experts = result.experts
    assert (experts.num_releases, experts.overall.times.count, experts.overall.num_rows) == (2, 1, 1)
    assert experts.overall.times.bias == rows[2].predicted_step_time / 2.5 - 1
    assert [figures.name for figures in experts.by["dispatcher"]] == ["alltoall"]
    assert [(figures.name, figures.errors.count) for figures in experts.memories] == [("some", 2)]
    assert dense.experts.overall.num_rows == 0


# --- the table ----------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_every_case_and_a_reason_where_nothing_is_predicted(tmp_path):
    cases = [
        CASE,
        changed(id="moe", model={**MODEL, "num_experts": 8}),
        changed(id="encoder", model={**MODEL, "kind": "encoder"}),
        changed(id="layer", model={**MODEL, "kind": "single-layer"}),
        changed(id="mla", model={**MODEL, "kind": "moe-mla"}),
        changed(id="chip", chip="h999"),
        {"id": "serving", "model": {"layers": 32}, "input_len": 128, "output_len": 128, "batch": 1},
        {"id": "only-an-id"},
        changed(id="oom", measured=None, outcome="out_of_memory"),
    ]
    path = write(tmp_path / "cases.jsonl", cases)
    with path.open("a") as stream:
        stream.write("not json\n\n[1, 2]\n")
    out = tmp_path / "results.csv"
    result = validate_cases(path, out=out)
    rows = list(csv.DictReader(io.StringIO(out.read_text(encoding="utf-8"))))
    assert tuple(rows[0])[: len(COLUMNS)] == COLUMNS  # those of serving follow
    assert [row["id"] for row in rows] == [*(case["id"] for case in cases), "line-10", "line-12"]
    for row in rows:
        predicted = bool(row["predicted_step_time"])
        assert predicted == bool(row["predicted_memory"]) == (row["predicted_fits"] in ("true", "false")) == (not row["reason"])
    assert [row["id"] for row in rows if not row["reason"]] == ["some-run", "oom"]
    assert float(rows[0]["measured_step_time"]) == 2.5
    assert float(rows[0]["measured_memory"]) == 50.0 * 2**30
    assert result.num_rows == 11
    assert result.num_predicted == 2
    assert sum(result.reasons.values()) + sum(result.serving.reasons.values()) == 9


def test_nothing_is_left_behind_where_the_table_cannot_be_written(tmp_path):
    path = write(tmp_path / "cases.jsonl", [CASE])
    with pytest.raises(InputError, match="cannot be written"):
        validate_cases(path, out=tmp_path / "missing" / "results.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cases.jsonl"]


def test_a_file_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"cases=.*cannot be read"):
        list(read_cases(tmp_path / "none.jsonl"))


def test_a_packed_file_reads_as_the_plain_one(tmp_path):
    plain = write(tmp_path / "cases.jsonl", [CASE, {"id": "x"}])
    packed = tmp_path / "cases.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert repr(list(read_cases(packed))) == repr(list(read_cases(plain)))


@pytest.mark.parametrize(
    "damage", [lambda data: data[: len(data) // 2], lambda data: data[:40] + b"?" * 40 + data[80:], lambda data: b"no"]
)
def test_a_damaged_packed_file_is_one_sentence(damage, tmp_path):
    packed = tmp_path / "cases.jsonl.gz"
    packed.write_bytes(damage(gzip.compress(json.dumps(CASE).encode() * 50)))
    with pytest.raises(InputError, match=r"cases=.*cannot be read"):
        list(read_cases(packed))


def test_progress_counts_the_cases(tmp_path):
    seen = []
    validate_cases(write(tmp_path / "cases.jsonl", [CASE, CASE, {"id": "x"}]), progress=seen.append)
    assert seen == [1, 2, 3]


def test_a_time_follows_from_the_tokens_where_the_run_prints_only_those():
    case = changed(measured={"step_time_s": None, "tokens_per_s_per_chip": 4096.0})
    assert row_of(case).measured_step_time == pytest.approx(128 * 4096 / (4096.0 * 64))


def test_the_summary_counts_and_averages():
    rows = [row_of(changed(id=f"a-{i}", measured={"step_time_s": time})) for i, time in enumerate((2.0, 2.5, 3.0))]
    rows += [row_of({"id": "b-1"}), row_of(changed(id="b-2", measured=None, outcome="out_of_memory"))]
    result = summarise(rows)
    a, b = result.sources
    errors = [row.time_error for row in rows[:3]]
    assert (a.name, a.num_rows, a.times.count, b.num_rows, b.times.count) == ("a", 3, 3, 2, 0)
    assert a.times.mean == pytest.approx(sum(map(abs, errors)) / 3)
    assert a.times.bias == pytest.approx(sorted(errors)[1])
    assert math.isnan(b.times.mean)
    assert result.overall.num_rows == 5
    fits = result.fits
    counts = (fits.ran_and_fits, fits.ran_but_predicted_out, fits.out_and_predicted_out, fits.out_but_predicted_fits)
    assert sum(counts) == 4


def test_several_files_are_one_after_the_other(tmp_path):
    ran = write(tmp_path / "ran.jsonl", [CASE])
    out = write(tmp_path / "out.jsonl", [changed(id="out", measured=None, outcome="out_of_memory", micro_batch=16)])
    result = validate_cases([ran, out])
    assert [row.id for row in result.rows] == ["some-run", "out"]
    assert (result.fits.num_ran, result.fits.num_out) == (1, 1)
    assert [fit.name for fit in result.framework_fits] == ["nanotron"]


def test_shares_of_fit_and_no_fit_are_of_the_runs_that_ran_and_of_those_that_ran_out():
    rows = [row_of(changed(id=f"r-{i}")) for i in range(3)]
    rows += [row_of(changed(id=f"o-{i}", measured=None, outcome="out_of_memory")) for i in range(4)]
    fits = summarise([replace(row, predicted_fits=row.id not in ("r-0", "o-1", "o-2")) for row in rows]).fits
    assert (fits.num_ran, fits.num_out) == (3, 4)
    assert fits.false_out_fraction == pytest.approx(1 / 3)
    assert fits.false_fit_fraction == pytest.approx(2 / 4)
    assert fits.accuracy == pytest.approx(4 / 7)
    assert math.isnan(summarise([]).fits.accuracy)


def test_a_run_that_does_not_state_its_recomputation_is_not_judged():
    stated, unstated = row_of(CASE), row_of(changed(recompute=None))
    assert (is_judged(stated), is_judged(unstated)) == (True, False)
    assert summarise([stated, unstated]).fits.num_ran == 1


def test_errors_of_memory_are_separated_by_what_the_framework_counts():
    megatron = changed(id="run-2", framework="Megatron-LM 0.14", settings={})
    bare = {"step_time_s": 2.5, "peak_memory_gib": None}
    result = summarise([row_of(CASE), row_of(megatron), row_of(changed(id="run-3", measured=bare))])
    by_name = {(figures.framework, figures.kind, figures.rank): figures for figures in result.memories}
    assert set(by_name) == {("nanotron", "reserved", "first"), ("megatron", "allocated", "fullest")}
    assert all(figures.errors.count == 1 for figures in result.memories)
    assert by_name["nanotron", "reserved", "first"].errors.mean == pytest.approx(abs(row_of(CASE).error("memory")))


# --- from a case to a plan ----------------------------------------------------------------------------------------


def plan(**values):
    return plan_of_case(inputs_of(changed(**values))).plan


def test_the_plan_is_the_one_that_the_case_states():
    p = plan()
    assert (p.layout.pp, p.layout.tp, p.layout.dp_shard, p.layout.dp_replicate, p.num_chips) == (2, 4, 8, 1, 64)
    assert (int(p.zero), p.micro_batch, p.num_microbatches, p.sequence_parallel) == (1, 1, 16, True)
    assert plan(zero_stage=0).layout.dp_replicate == 8


def test_null_means_what_the_format_says():
    p = plan(
        framework="Megatron-Core",
        cp=None,
        ep=None,
        virtual_stages=None,
        sequence_parallel=None,
        zero_stage=None,
        distributed_optimizer=False,
    )
    assert (p.layout.cp, p.virtual_stages, p.sequence_parallel, int(p.zero)) == (1, 1, False, 0)
    assert int(plan(framework="Megatron-Core", zero_stage=None, distributed_optimizer=True).zero) == 1
    assert int(plan(framework="Megatron-DeepSpeed (PyTorch 2.0.1)", zero_stage=None).zero) == 0
    arguments = {"megatron_args": ["use-distributed-optimizer=True"]}
    assert int(plan(framework="Megatron-LM dev", zero_stage=None, settings=arguments).zero) == 1
    assert str(plan(framework="Megatron-LM (2022)", flash_attention=None).attention) == "unfused"
    assert str(plan(framework="Composer/FSDP (llm-foundry)", flash_attention=None).attention) == "flash"


def test_what_an_unknown_framework_does_not_state():
    """Sequence parallelism as plans have it, what torch's FSDP runs again under ZeRO 3 and Megatron's attention core under all else."""
    unsaid = plan(framework=None, sequence_parallel=None, recompute="selective")
    assert unsaid.sequence_parallel
    assert unsaid.recompute_operators == ("attention_core",)
    assert not plan(framework=None, sequence_parallel=False).sequence_parallel
    sharded = plan(framework=None, zero_stage=3, recompute="selective", pp=1, dp=16)
    assert sharded.recompute_operators == plan(framework="torchtitan", zero_stage=3, recompute="selective", pp=1, dp=16).recompute_operators


def test_hybrid_sharding_stays_in_the_node():
    p = plan(framework="PyTorch FSDP", tp=1, pp=1, dp=64, zero_stage=3, sequence_parallel=False, settings={"sharding": "HSDP"})
    assert (p.layout.dp_shard, p.layout.dp_replicate) == (8, 8)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("Megatron-LM (2022)", "megatron"),
        ("Megatron-LM 2020", "megatron-2020"),
        ("Megatron-LM 0.14 / TE 2.11", "megatron"),
        ("NeMo 24.07", "nemo"),
        ("Megatron-Bridge / 26.02", "nemo"),
        ("Megatron-DeepSpeed (PyTorch 2.0.1)", "deepspeed"),
        ("nanotron v0.5", "nanotron"),
        ("Composer/FSDP (llm-foundry)", "composer-fsdp"),
        ("torchtitan (2024)", "torchtitan"),
        ("PyTorch FSDP (fms-fsdp, torch.compile)", "torch-fsdp2"),
        ("llm.c (CUDA)", "llm-c"),
        ("a framework of next year", "generic"),
        (None, "generic"),
        (3.5, "generic"),
    ],
)
def test_the_framework_names_its_profile(name, profile):
    assert framework_of(name).profile == profile
    assert load_profile(profile).name == profile


@pytest.mark.parametrize(
    ("changes", "stages"),
    [
        ({}, 8),
        ({"framework": "Megatron-LM"}, 1),
        ({"virtual_stages": 1}, 1),
        ({"pp": 1, "dp": 8}, 1),
        ({"global_batch": 24}, 1),  # three microbatches for four stages: the schedule does not exist
        ({"model": {**MODEL, "num_hidden_layers": 80}}, 10),
        ({"model": {**MODEL, "num_hidden_layers": 126}, "pp": 16, "dp": 1}, 8),  # with the ends
        ({"model": {**MODEL, "num_hidden_layers": 31}}, 1),
    ],
)
def test_nemo_interleaves_where_a_run_does_not_say_how_far(changes, stages):
    unstated = {name: value for name, value in CASE.items() if name not in ("virtual_stages", "num_chips")}
    planned = plan_of_case({**unstated, "framework": "Megatron-Bridge / 26.02", "pp": 4, "dp": 8, "global_batch": 64, **changes})
    assert planned.plan.virtual_stages == stages
    assert ("virtual_stages" in planned.assumed) is (stages > 1)


def test_settings_that_are_not_read_are_counted(tmp_path):
    odd = {"fused_rms": True, "compile": "perhaps", "tp_mode": "REDUCE_SCATTER", "gradient_bucket_mb": 25.0, "async_tp": None}
    result = validate_cases(write(tmp_path / "cases.jsonl", [{**CASE, "settings": odd}, {**CASE, "settings": {"fused_rms": 1}}, CASE]))
    assert result.passed_over == {"fused_rms": 2, "compile=perhaps": 1}


def test_settings_change_the_profile():
    base = load_profile("megatron")
    assert with_settings(base, {}) == base
    assert with_settings(base, {"mystery": 1, "compile": None}) == base
    fused = with_settings(base, {"fused_cross_entropy": True})
    assert (fused.kernels.fused_cross_entropy, fused.kernels.logit_bytes) == (
        False,
        14.0,
    )  # Megatron's saves traffic, its softmax stays in float32
    assert with_settings(load_profile("torch-fsdp2"), {"fused_cross_entropy": True}).kernels.fused_cross_entropy
    assert with_settings(base, {"megatron_args": ["cross-entropy-loss-fusion=True", 7, "flag"]}) == fused
    assert with_settings(base, {"gradient_bucket_mb": 25.0}).communication.bucket_bytes == 25 * 2**20
    assert not with_settings(base, {"gradient_bucketing": False}).communication.overlaps_gradients
    assert with_settings(base, {"fp8_recipe": "rowwise"}).rates.fp8_matmul_rate_fraction < base.rates.fp8_matmul_rate_fraction
    assert with_settings(base, {"fp8_recipe": "tensorwise"}) == base
    composer = load_profile("composer-fsdp")
    assert with_settings(composer, {"mixed_precision_mode": "DEFAULT"}).communication.reduce_dtype == "fp32"
    assert with_settings(composer, {"mixed_precision_mode": "PURE"}) == composer
    assert with_settings(base, {"async_tp": True}).timing.tp_overlap_fraction > base.timing.tp_overlap_fraction


def test_what_a_frameworks_scripts_leave_off_is_off_where_the_run_does_not_say_it():
    run = {**WITH_EXPERTS, "framework": "Megatron-LM 0.14 / TE 2.11 (SimuMax repro)", "settings": {"fused_cross_entropy": True}}
    assert not plan_of_case(inputs_of(run)).profile.communication.overlaps_gradients
    assert plan_of_case(inputs_of({**run, "framework": "Megatron-LM 0.14"})).profile.communication.overlaps_gradients
    assert plan_of_case(inputs_of({**run, "settings": {"gradient_bucketing": True}})).profile.communication.overlaps_gradients


@pytest.mark.parametrize("precision", ["fp8", "mxfp8"])
def test_narrow_matmuls_are_faster_and_their_copies_take_memory(precision):
    """Where the chip sets the time: one sequence in a pass is bound by the host's launches, of which casts need more."""
    wide, narrow = (row_of(changed(framework="Megatron-LM", precision=p, micro_batch=4)) for p in ("bf16", precision))
    assert narrow.predicted_step_time < 0.9 * wide.predicted_step_time
    assert wide.predicted["memory"] < narrow.predicted["memory"] < 1.2 * wide.predicted["memory"]
    assert "fp8" in row_of(changed(precision=precision, chip="a100-sxm-80gb")).reason


def test_nanotron_cuts_stages_where_the_running_cost_passes_its_share():
    """8.86 B on 8 stages: a stage's share is 4.27 layers, so the first takes five; the head, as heavy as 2.2 layers, leaves three."""
    model = plan().job.model
    wide = {**MODEL, "num_key_value_heads": 32, "vocab_size": 131072}
    big = plan(model=wide, pp=8, dp=2).job.model
    layers = stage_layers_by_cost(big, 8)
    assert (layers[0], layers[-1], sum(layers)) == (5, 2, 32)
    assert stage_layers_by_cost(model, 1) == (32,)
    assert sum(stage_layers_by_cost(model, 5)) == 32


def test_embedding_and_head_count_as_layers_where_that_makes_stages_even():
    assert stage_layers_with_ends(126, 128) == (0, *(1,) * 126, 0)
    assert stage_layers_with_ends(126, 16) == (7, *(8,) * 14, 7)
    assert stage_layers_with_ends(96, 8) is None
    assert stage_layers_with_ends(32, 1) is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (dict(global_batch=None), "global_batch: the run does not state it"),
        (dict(global_batch=3.7), "global_batch=3.7: must be a whole number"),
        (dict(num_chips=None, dp=None), "num_chips: the run states neither it nor dp"),
        (dict(num_chips=60), "num_chips=60: must be a multiple of tp"),
        (dict(precision="int3"), "precision=int3: not known"),
        (dict(recompute="some"), "recompute=some: not known"),
        (dict(chip="../secret.yaml"), "chip="),
        (dict(chip=None), "chip=None"),
        (dict(tp=3, num_chips=48), "tp=3: must divide"),
        (dict(inter_node_gbit_per_s_per_node=-1), "inter_node_gbit"),
        (dict(zero_stage=9), "zero_stage=9"),
        (dict(model=None), "model: the run does not state it"),
        (dict(pp=64, tp=1, dp=1), "must not exceed num_hidden_layers"),
    ],
)
def test_what_cannot_be_predicted_says_why(values, reason):
    row = row_of(changed(**values))
    assert not row.is_predicted
    assert reason in row.reason
    assert "\n" not in row.reason


@pytest.mark.parametrize(
    "values",
    [dict(cooling="water"), dict(flash_attention="auto"), dict(model={**MODEL, "rope": {"theta": 1e4}}), dict(lora="no", settings=[3])],
)
def test_what_perfmodel_does_not_read_changes_no_prediction(values):
    row = row_of(changed(**values))
    assert row.is_predicted
    expected = row_of(changed(**({"flash_attention": None} if "flash_attention" in values else {})))
    assert row.predicted_step_time == expected.predicted_step_time


# --- fuzz ---------------------------------------------------------------------------------------------------------

JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=20),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(line=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)))
def test_any_line_is_a_case_or_has_a_reason(line):
    case = parse_case(line, 5)
    assert case.id
    if case.reason:
        assert case.reason.startswith("line 5")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=st.dictionaries(st.sampled_from(sorted(CASE)), JUNK, max_size=4),
    model=st.dictionaries(st.sampled_from(sorted(MODEL)), JUNK, max_size=3),
    dropped=st.sets(st.sampled_from(sorted(set(CASE) - {"id"})), max_size=4),
)
@pytest.mark.slow
def test_a_mangled_case_is_a_row_with_a_prediction_or_a_reason(fields, model, dropped):
    case = {**CASE, "model": {**MODEL, **model}, **fields}
    case = {name: value for name, value in case.items() if name not in dropped}
    row = PREDICTOR.row(parse_case(json.dumps(case), 1))
    assert row.is_predicted == (row.reason == "")
    assert "please report" not in row.reason
    if row.is_predicted:
        assert row.predicted_step_time > 0
        assert row.predicted["memory"] > 0
        assert row.predicted_fits is not None


def test_settings_of_torch_runs_are_read():
    inputs = inputs_of(changed(framework="InternEvo", zero_stage=1, dp=64, tp=1, pp=1, num_chips=64, settings={"zero_group": 8}))
    plan = plan_of_case(inputs).plan
    assert (plan.layout.dp_shard, plan.layout.dp_replicate, plan.zero) == (8, 8, 1)
    kept = {"reshard_after_forward": False, "kernels": ["te"]}
    planned = plan_of_case(inputs_of(changed(framework="NeMo Automodel", zero_stage=3, tp=1, settings=kept)))
    assert (planned.plan.zero, planned.profile.name, planned.profile.kernels.rms_norm_traffic) == (2, "nemo-automodel", 1.0)


def test_forced_routing_to_neighbours_stays_on_few_ranks():
    case = changed(
        framework="NeMo Automodel",
        model={**MODEL, "name": "ours", "kind": "moe", "num_experts": 64, "num_experts_per_tok": 8},
        ep=8,
        tp=1,
        settings={"balanced_routing": "forced", "kernels": ["deepep"]},
    )
    planned = plan_of_case(inputs_of(case))
    experts = planned.plan.job.transformer.parts.experts
    assert (planned.plan.dispatcher, experts.num_groups, experts.top_groups) == ("flex", 8, 1)
    free = plan_of_case(inputs_of({**case, "settings": {"kernels": ["deepep"]}})).plan.job.transformer.parts.experts
    assert (free.num_groups, free.top_groups) == (1, 1)


def test_the_release_in_the_name_of_a_framework_says_how_its_recipe_runs():
    qwen = {
        **MODEL, "name": "Qwen3-235B-A22B", "kind": "moe", "num_hidden_layers": 94, "hidden_size": 4096, "num_attention_heads": 64,
        "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    run = changed(model=qwen, chip="h100-sxm-80gb", precision="fp8", tp=2, pp=8, dp=16, ep=32, virtual_stages=4, num_chips=256)
    planned = {release: plan_of_case(inputs_of({**run, "framework": f"Megatron-Bridge / {release}"})) for release in ("25.09", "25.11")}
    assert {release: run_plan.profile.exchanges.hides_exchanges for release, run_plan in planned.items()} == {
        "25.09": False,
        "25.11": True,
    }
    model = {"name": "DeepSeek-V3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "num_experts": 256}
    deepseek = {
        **run,
        "model": {**qwen, **model, "num_key_value_heads": 128},
        "framework": "Megatron-Bridge / 26.04",
        "virtual_stages": 2,
        "recompute": None,
    }
    plan = plan_of_case(inputs_of(deepseek)).plan
    assert (plan.dispatcher, str(plan.recompute)) == ("flex", "selective")
    assert plan.recompute_operators == module_operators(("mla_up_proj", "mlp"))


KINDS = [
    {"chip": "v100-sxm2-16gb", "count": 12, "nodes": 3, "network_gbit_s": 10},
    {"chip": "t4-16gb", "count": 4, "nodes": 1, "network_gbit_s": 50},
]


def test_a_run_on_several_kinds_of_chips():
    case = changed(
        chips=KINDS, num_chips=16, dp=4, tp=1, pp=4, global_batch=32, sequence_length=512, precision="fp16", sequence_parallel=False,
        model={**MODEL, "num_hidden_layers": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16},
    )  # fmt: skip
    planned = plan_of_case(inputs_of(case))
    assert planned.hardware.cluster == ("12@v100-sxm2-16gb per-node=4 scale-out=2.5 Gbit/s+4@t4-16gb per-node=4 scale-out=12.5 Gbit/s")
    stages = [{"units": units} for units in (7, 7, 6, 10)]
    assert plan_of_case(inputs_of({**case, "stages": stages})).plan.stage_layers == (5, 7, 6, 6)
    mixed, fast = row_of(case), row_of({**case, "chips": [KINDS[0], {**KINDS[1], "chip": "v100-sxm2-16gb"}]})
    assert mixed.predicted_step_time > fast.predicted_step_time
    assert mixed.predicted["memory"] > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chips": [{"count": 8}]}, "chips.0.chip: required field is missing"),
        ({"chips": [3]}, "chips.0=3: must be a mapping"),
        ({"chips": [{**KINDS[0], "count": 0}, KINDS[1]]}, "count"),
        ({"chips": [{**KINDS[0], "network_gbit_s": "fast"}, KINDS[1]]}, "network_gbit_s"),
        ({"chips": [{**KINDS[0], "chip": "nothing"}, KINDS[1]]}, "nothing"),
        ({"stages": [{"units": 3}, {"units": 4}]}, "32 or more in all"),
        ({"stages": ["a"]}, "stages.0='a': must be a mapping"),
    ],
)
def test_impossible_kinds_and_stages_are_reported(fields, message):
    row = row_of(changed(**{"num_chips": 16, "dp": 2, **fields}))
    assert message in row.reason
