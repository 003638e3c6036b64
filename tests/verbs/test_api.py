"""The verbs for Python: names, paths or objects in, frozen results out."""

import dataclasses

import pytest

import perfmodel
from perfmodel import InputError
from perfmodel.cli.app import run
from perfmodel.parallel.knobs import Knobs
from perfmodel.verbs.api import compare_measurement
from perfmodel.verbs.searching import search_in
from perfmodel.verbs.setting import annotated, make_job, make_setting
from tests.parallel.test_results import MEASUREMENT

JOB = dict(model="llama-3-8b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192)


def test_names_and_objects_are_the_same():
    by_name = perfmodel.predict(**JOB, tp=2, pp=2)
    objects = dict(JOB, model=perfmodel.load_model("llama-3-8b"), cluster=perfmodel.load_cluster("dgx-h100"))
    assert perfmodel.predict(**objects, tp=2, pp=2) == by_name


def test_results_are_frozen():
    prediction = perfmodel.predict(**JOB)
    with pytest.raises(dataclasses.FrozenInstanceError):
        prediction.step_time = 0.0


def test_a_plan_its_file_and_its_knobs_predict_the_same(tmp_path):
    by_knobs = perfmodel.predict(**JOB, tp=2, pp=2, recompute="selective")
    perfmodel.write_plan(by_knobs.plan, tmp_path / "plan.yaml")
    assert perfmodel.predict(by_knobs.plan) == by_knobs
    assert perfmodel.predict(tmp_path / "plan.yaml") == by_knobs
    assert perfmodel.predict("fsdp").plan.layout.dp_shard == 64


@pytest.mark.parametrize("path", ["./mine.yaml", "mine.json"])
def test_a_cluster_file_is_named_in_full_so_that_the_plan_finds_it(tmp_path, monkeypatch, path):
    from perfmodel.hardware.writer import save_cluster

    save_cluster(perfmodel.load_cluster("dgx-h100"), tmp_path / "mine.yaml")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").rename(path)
    prediction = perfmodel.predict(**dict(JOB, cluster=path), tp=2)
    monkeypatch.chdir("/")
    assert prediction.plan.cluster == str(tmp_path / path)
    assert perfmodel.predict(prediction.plan) == prediction


def test_rows_of_predictions_are_flat_and_those_of_the_csv(tmp_path):
    pandas = pytest.importorskip("pandas")
    job = {"model": "gpt2", "cluster": "dgx-h100", "chips": [8, 16], "global_batch": 64, "seq_len": 1024, "tp": [1, 5]}
    frame = pandas.DataFrame(perfmodel.prediction_rows(perfmodel.predict(**job)))
    path = tmp_path / "table.csv"
    flags = "--model gpt2 --cluster dgx-h100 --chips 8,16 --global-batch 64 --seq-len 1024 --tp 1,5"
    assert run(["predict", *flags.split(), "--csv", str(path)]) == 0
    assert list(frame.columns) == list(pandas.read_csv(path).columns)
    assert len(frame) == 4
    assert list(frame["reason"] != "") == [False, False, True, True]
    assert not frame.map(lambda value: isinstance(value, (dict, list, tuple))).any(axis=None)


@pytest.mark.slow
def test_find_plans_agrees_with_predict():
    result = perfmodel.find_plans(**JOB, top=3, maximum={"tp": 2})
    assert [perfmodel.predict(plan.plan).step_time for plan in result.plans] == [plan.step_time for plan in result.plans]
    assert all(plan.plan.layout.tp <= 2 for plan in result.plans)


@pytest.mark.parametrize("seq_len", [32768, 131072])
def test_a_search_cuts_long_sequences(seq_len):
    job = dict(model="llama-3.1-8b", cluster="dgx-h100", chips=8, global_batch=16, seq_len=seq_len, profile="megatron")
    best = perfmodel.find_plans(**job, top=1).plans[0]
    assert best.plan.layout.cp > 1
    uncut = perfmodel.predict(**job, zero=1)
    assert perfmodel.predict(**job, cp=8, zero=1).step_time < 1.15 * uncut.step_time


def test_a_run_on_gpus_is_compared_with_the_chunks_that_it_ran():
    """The executor gives a context-parallel rank one chunk of the sequence, whatever the framework of the plan does."""
    plan = perfmodel.predict(**dict(JOB, chips=8, seq_len=65536), cp=8, zero=1).plan
    measurement = dataclasses.replace(MEASUREMENT, plan=plan, plan_hash=plan.hash(), device="cuda", num_ranks=8, memory_by_rank=(1e9,) * 8)
    assert compare_measurement(measurement).prediction.step_time > 1.4 * perfmodel.predict(plan).step_time


@pytest.mark.slow
def test_a_search_reports_its_progress():
    shares: list[float] = []
    perfmodel.find_plans(**JOB, progress=shares.append)
    assert shares == sorted(shares)
    assert 0.0 <= shares[0] <= shares[-1] <= 1.0


def test_explain_and_compare():
    explanation = perfmodel.explain_plan("megatron-22b", why_not={"tp": 4})
    assert explanation.why_not[0].knobs == {"tp": 4}
    first, second = perfmodel.compare_plans(["megatron-22b", "fsdp"])
    assert (first.plan.num_chips, second.plan.num_chips) == (8, 64)


def test_validate_writes_its_table(tmp_path):
    (tmp_path / "cases.jsonl").write_text('{"id": "nothing"}\n')
    result = perfmodel.validate_cases(tmp_path / "cases.jsonl", out=tmp_path / "out.csv")
    assert result.num_predicted == 0
    lines = (tmp_path / "out.csv").read_text().splitlines()
    # more columns may follow, these stay
    assert lines[0].startswith("id,predicted_step_time,measured_step_time,predicted_memory,measured_memory,predicted_fits,reason")
    assert lines[1].startswith("nothing,,,,,,")


@pytest.mark.parametrize("missing", ["model", "cluster", "chips", "global_batch", "seq_len"])
def test_what_is_missing_is_named(missing):
    job = {key: value for key, value in JOB.items() if key != missing}
    with pytest.raises(InputError, match=f"^{missing}: is missing"):
        perfmodel.predict(**job)


def test_bad_knobs_are_value_errors():
    with pytest.raises(ValueError, match="tp=3"):
        perfmodel.predict(**JOB, tp=3)
    with pytest.raises(ValueError, match="memory_headroom"):
        perfmodel.predict(**JOB, memory_headroom=1.0)
    with pytest.raises(ValueError, match="objective"):
        perfmodel.find_plans(**JOB, objective="luck")


@pytest.mark.parametrize(
    "wrong",
    [
        dict(micro_batch=1.5),
        dict(sequence_parallel="no", tp=2),
        dict(tp=[2.5]),
        dict(chips=8.5),
        dict(chips=True),
        dict(order=8),
        dict(order=[1, 2]),
        dict(calibration=3),
        dict(profile=3),
        dict(model=3.5),
        dict(cluster={"name": 1}),
        dict(seq_len="8x"),
        dict(global_batch=None, batch_tokens="4q"),
        dict(recompute=3),
        dict(schedule=["1f2b"]),
        dict(attention=1),
        dict(precision=16),
        dict(optimizer=1.0),
        dict(memory_headroom="ten"),
        dict(memory_headroom=[0.1]),
        dict(tp="9" * 5000),
        dict(tp=10**5000),
        dict(plan=3),
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_types_are_input_errors(wrong):
    with pytest.raises(InputError):
        perfmodel.predict(**{**JOB, **wrong})


SERVED = dict(model="llama-3-8b", cluster="dgx-h100", chips=1, input_len=1024, output_len=256, concurrency=4)


def test_wrong_types_of_other_verbs_are_input_errors():
    for call in (
        lambda: perfmodel.find_plans(**JOB, maximum={"tp": 1.5}),
        lambda: perfmodel.find_plans(**JOB, maximum=8),
        lambda: perfmodel.find_plans(**JOB, maximum={"recompute": 1}),
        lambda: perfmodel.find_plans(**JOB, objective=1),
        lambda: perfmodel.find_plans(**JOB, top=1.5),
        lambda: perfmodel.read_plan(3),
        lambda: perfmodel.explain_plan("fsdp", why_not={"recompute": "x"}),
        lambda: perfmodel.explain_plan("fsdp", why_not={"tp": 1.5}),
        lambda: perfmodel.explain_plan("fsdp", why_not=8),
        lambda: perfmodel.explain_plan(3),
        lambda: perfmodel.compare_plans(3),
        lambda: perfmodel.load_cluster("dgx-h100", num_chips="x"),
        lambda: perfmodel.load_cluster(3),
        lambda: perfmodel.load_chip(None),
        lambda: perfmodel.load_model([8]),
        lambda: perfmodel.make_plan(perfmodel.read_plan("fsdp").job, cluster="dgx-h100", num_chips=8, stage_layers=3),
        lambda: perfmodel.make_plan(perfmodel.read_plan("fsdp").job, cluster="dgx-h100", num_chips=8, order=[1]),
        lambda: perfmodel.make_plan(perfmodel.read_plan("fsdp").job, cluster=3, num_chips=8),
        lambda: perfmodel.find_plans(**JOB, progress=3),
        lambda: perfmodel.find_limits(model="gpt2", cluster="dgx-h100", seq_len=1024, chips=1, progress=3),
        lambda: perfmodel.fit_runs({"model": "gpt2"}, save=8),
        lambda: perfmodel.load_network([None]),
        lambda: perfmodel.load_network(10**5000),
        lambda: perfmodel.cluster_of_chip(10**5000),
        lambda: perfmodel.find_serving(**SERVED, quantizations=2),
        lambda: perfmodel.serve(**SERVED, kv_precision=10**5000),
        lambda: perfmodel.serve(**SERVED, quantization=10**5000),
        lambda: perfmodel.run_plan("fsdp", steps=1.5),
        lambda: perfmodel.audit_plan("fsdp", rank="x"),
        lambda: perfmodel.calibrate_machine(ranks=1.5),
        lambda: perfmodel.validate_cases(3),
        lambda: perfmodel.validate_cases("cases.jsonl", by=3),
        lambda: perfmodel.validate_cases("cases.jsonl", by=[3]),
        lambda: perfmodel.cluster_of_chip("h100-sxm-80gb", scale_up=[]),
        lambda: perfmodel.cluster_of_chip("h100-sxm-80gb", scale_out=10**400),
        lambda: perfmodel.write_plan({}, "plan.yaml"),
        lambda: perfmodel.write_plan(None, "plan.yaml"),
        lambda: perfmodel.shard_network("alexnet", cluster="dgx-h100", chips=8, sizes={1: 2}),
        lambda: perfmodel.shard_network("alexnet", cluster="dgx-h100", chips=2, microbatches=10**400),
        lambda: perfmodel.import_graph(3),
        lambda: perfmodel.shard_network("alexnet", cluster="dgx-h100", chips="x"),
        lambda: perfmodel.shard_network(3, cluster="dgx-h100", chips=8),
        lambda: perfmodel.make_plan(perfmodel.read_plan("fsdp").job, cluster="dgx-h100", num_chips=8, micro_batch=1.5),
    ):
        with pytest.raises(InputError):
            call()


def test_values_may_be_texts_as_on_the_command_line():
    typed = dict(JOB, chips="64", seq_len="8k", tp="2", memory_headroom="10%")
    assert perfmodel.predict(**typed) == perfmodel.predict(**JOB, tp=2, memory_headroom=0.1)


@pytest.mark.slow
def test_lists_give_one_prediction_for_each_combination():
    predictions = perfmodel.predict(**{**JOB, "chips": [64, 100, 128], "profile": ["megatron", "torchtitan"]}, tp=2)
    assert [(prediction.plan.num_chips, prediction.plan.profile) for prediction in predictions] == [
        (64, "megatron"),
        (64, "torchtitan"),
        (128, "megatron"),
        (128, "torchtitan"),
    ]
    assert [case.asked["chips"] for case in predictions.not_predicted] == [100, 100]
    assert "torchtitan" in str(predictions)
    assert predictions._repr_html_().count("<tr>") == 5
    searches = perfmodel.find_plans(**{**JOB, "chips": "64,128", "profile": "megatron"}, top=1)
    assert [search.plans[0].plan.num_chips for search in searches] == [64, 128]


def test_knobs_with_a_plan_override_it():
    plan = perfmodel.predict(**JOB, fsdp=32, tp=2).plan
    assert perfmodel.predict(plan, tp=4, dp_shard=16, seq_len="4k") == perfmodel.predict(**dict(JOB, seq_len=4096), fsdp=16, tp=4)


def test_a_prediction_prints_as_a_summary():
    text = str(perfmodel.predict(**JOB, tp=8))
    assert 5 <= len(text.splitlines()) <= 8
    assert "TFLOP/s a chip, MFU" in text


TOO_LARGE = {"model": "gpt3-175b", "global_batch": 64, "seq_len": 2048}


@pytest.mark.parametrize(
    ("given", "freed"),
    [
        ({}, False),
        ({"dp_replicate": 1, "dp_shard": 4}, False),  # the pipeline may still grow
        ({"tp": 8, "pp": 1, "cp": 1, "dp_replicate": 1, "dp_shard": 1}, True),  # nothing may but what is freed
        ({"tp": 4, "pp": 1, "cp": 1, "dp": 2}, True),  # nor here: the product of the data-parallel degrees is given
    ],
)
@pytest.mark.slow
def test_the_chips_that_would_be_enough(given, freed):
    setting = make_setting(make_job(**TOO_LARGE), "dgx-a100", chips=8)
    (remedy,) = (
        candidate for candidate in search_in(setting, Knobs(**given), {}, also=("remedies",)).remedies if "chips" in candidate.changes
    )
    assert remedy.changes["chips"] == 48
    assert set(remedy.changes) == {"chips", *(given if freed else ())}
    assert remedy.prediction.fits


@pytest.mark.slow
def test_a_search_prints_as_a_table():
    result = perfmodel.find_plans(**JOB, top=3)
    assert result.best is result.plans[0]
    assert len(str(result).splitlines()) == 5
    assert result._repr_html_().count("<tr>") == 4


def test_a_utilisation_above_the_peak_says_what_it_counts():
    setting = make_setting(make_job("gpt2", global_batch=8, seq_len=1024), "dgx-h100", chips=8)
    prediction = perfmodel.predict(model="gpt2", cluster="dgx-h100", chips=8, global_batch=8, seq_len=1024)
    assert annotated(prediction, setting).warnings == ()
    (warning,) = annotated(dataclasses.replace(prediction, mfu_palm=1.1, mfu_causal=1.0), setting).warnings
    assert "full square of attention" in warning


@pytest.mark.slow
def test_an_explanation_prints_as_sentences():
    lines = str(perfmodel.explain_plan(perfmodel.predict(**JOB, tp=2).plan, why_not={"tp": 4})).splitlines()
    assert lines[0].startswith("why not tp=4: ")
    assert "the same plan with one knob turned:" in lines
    assert not any("none of 1 such" in line for line in lines)
    assert not any("Alternative(" in line or "Prediction(" in line for line in lines)


def test_a_sharded_network_prints_as_a_summary():
    printed = str(perfmodel.shard_network("alexnet", cluster="dgx-h100", chips=2))
    assert printed.startswith("network ")
    assert "data parallel" in printed
    assert len(printed.splitlines()) < 10


@pytest.mark.parametrize(
    "job",
    [
        {"model": "llama-3-70b", "cluster": "dgx-h100", "chips": 32, "global_batch": 64, "seq_len": 8192, "profile": "megatron"},
        {"model": "mixtral-8x7b", "cluster": "dgx-a100", "chips": 16, "global_batch": 64, "seq_len": 4096, "objective": "memory"},
        {"model": "gpt3-175b", "cluster": "dgx-a100", "chips": 64, "global_batch": 128, "seq_len": 2048},
    ],
    ids=lambda job: job["model"],
)
@pytest.mark.slow
def test_a_search_without_pruning_finds_the_same(job):
    pruned, exhaustive = perfmodel.find_plans(**job), perfmodel.find_plans(**job, exhaustive=True)
    for name in ("plans", "ranking", "pareto", "least_memory", "rejected", "num_feasible", "certainty", "any_framework"):
        assert getattr(exhaustive, name) == getattr(pruned, name), name
    assert exhaustive.num_evaluated >= pruned.num_evaluated
