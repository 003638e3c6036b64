"""`fit_runs`: from measured runs to a profile that predicts better, says what it knows, and narrows intervals."""

import math

import pytest

import perfmodel
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import load_profile
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.plan_file import write_plan
from perfmodel.parallel.request import Request
from perfmodel.verbs.confidence import confidence_in
from perfmodel.verbs.requests import setting_of_request
from perfmodel.verbs.setting import plan_in
from tests.fitting.made_up import BASE, changed, csv_text, jsonl_text, rows


@pytest.fixture(scope="module")
def fit():
    return perfmodel.fit_runs(rows()[:4], profile=BASE)


def test_a_few_runs_take_most_of_the_error_away(fit):
    assert fit.error_before > 0.10
    assert fit.error_after < 0.03
    assert fit.error_left_out < 0.4 * fit.error_before


def test_the_next_plan_is_predicted_better(fit):
    run = dict(rows()[4])
    measured = run.pop("step_time")
    asked = {name: run[name] for name in ("model", "chips", "global_batch", "tp", "dp", "zero", "micro_batch", "seq_len", "recompute")}
    before, after = (
        perfmodel.predict(**asked, cluster=run["chip"], profile=profile).step_time / measured - 1.0 for profile in (BASE, fit.profile)
    )
    assert abs(after) < 0.4 * abs(before)


def runs_that_shard(profile):
    """Steps of a job under ZeRO 1 and 0, as this profile predicts them."""
    job = dict(model="llama-3-8b", chip="h100-sxm-80gb", chips=256, global_batch=256, seq_len=4096)
    runs = []
    for plan in (dict(tp=8, zero=1, micro_batch=8), dict(tp=4, zero=1, micro_batch=4), dict(tp=8, zero=0, micro_batch=8)):
        asked = {**job, **plan, "dp": job["chips"] // plan["tp"]}
        words = {name: value for name, value in asked.items() if name != "chip"}
        runs.append({**asked, "step_time": perfmodel.predict(**words, cluster=job["chip"], profile=profile).step_time})
    return runs


@pytest.mark.slow
def test_runs_say_whether_scatters_wait_for_the_end_of_backward():
    fit = perfmodel.fit_runs(runs_that_shard(load_profile("megatron").having(exposed_scatter_fraction=1.0)), profile="megatron")
    (behaviour,) = (behaviour for behaviour in fit.behaviours if behaviour.name == "exposed_scatter_fraction")
    assert (behaviour.prior, behaviour.determined) == (0.0, "in part")
    assert behaviour.value > 0.2, "what of it is not said to be late is said to be gathers that take longer"
    assert fit.error_after < 0.4 * fit.error_before


@pytest.mark.slow
def test_runs_say_how_long_the_gathers_of_updated_parameters_take():
    fit = perfmodel.fit_runs(runs_that_shard(load_profile("megatron").having(publish_factor=4.0)), profile="megatron")
    (behaviour,) = (behaviour for behaviour in fit.behaviours if behaviour.name == "publish_factor")
    assert (behaviour.prior, behaviour.determined) == (1.0, "by the runs")
    assert 2.0 < behaviour.value < 5.0
    assert fit.error_after < 0.4 * fit.error_before


def test_runs_say_more_of_an_unmeasured_machine():
    """This one, by its data sheet: half as fast as that says."""
    asked = [dict(model="gpt2", chips=1, global_batch=4, seq_len=seq_len, precision="fp32") for seq_len in (64, 128, 256)]
    times = [perfmodel.predict(**plan, cluster="localhost", calibration="spec-sheet", memory_headroom=0).step_time for plan in asked]
    runs = [{**plan, "cluster": "localhost", "step_time": 2 * time} for plan, time in zip(asked, times, strict=True)]
    fit = perfmodel.fit_runs(runs, calibration="spec-sheet")
    assert fit.error_before == pytest.approx(0.5, rel=1e-3)
    assert fit.error_after < 0.05


def test_it_says_what_the_runs_determined_and_what_is_still_prior(fit):
    behaviours = {behaviour.name: behaviour for behaviour in fit.behaviours}
    moved, unmoved = behaviours["matmul_rate_fraction"], behaviours["fp8_matmul_rate_fraction"]
    assert moved.determined in ("by the runs", "in part")
    assert moved.spread < 0.85 * moved.prior_spread
    assert unmoved.determined == "still prior"
    assert (unmoved.value, unmoved.spread) == (unmoved.prior, unmoved.prior_spread)


@pytest.mark.slow
def test_csv_and_json_lines_say_the_same(fit, tmp_path):
    (tmp_path / "runs.csv").write_text(csv_text(rows()[:4]))
    (tmp_path / "runs.jsonl").write_text(jsonl_text(rows()[:4]))
    for name in ("runs.csv", "runs.jsonl"):
        again = perfmodel.fit_runs(tmp_path / name, profile=BASE)
        assert again.error_left_out == pytest.approx(fit.error_left_out, rel=1e-9)


def test_what_is_saved_is_the_profile_and_every_verb_takes_it(tmp_path):
    path = tmp_path / "mine.yaml"
    fit = perfmodel.fit_runs(rows()[:3], profile=BASE, save=path)
    assert fit.profile.name == "mine"
    assert load_profile(path) == fit.profile
    run = rows()[0]
    asked = {"model": run["model"], "cluster": run["chip"], "chips": 16, "global_batch": 64, "seq_len": 4096, "fsdp": 16}
    assert perfmodel.predict(**asked, profile=path).step_time == pytest.approx(run["step_time"], rel=0.05)


def test_a_plan_that_is_saved_with_it_finds_it_again(tmp_path):
    perfmodel.fit_runs(rows()[:1], profile=BASE, save=tmp_path / "mine.yaml")
    run = rows()[0]
    asked = {"model": run["model"], "cluster": run["chip"], "chips": 16, "global_batch": 64, "seq_len": 4096, "fsdp": 16}
    prediction = perfmodel.predict(**asked, profile=tmp_path / "mine.yaml")
    write_plan(prediction.plan, tmp_path / "plan.yaml")
    assert perfmodel.predict(tmp_path / "plan.yaml").step_time == prediction.step_time


@pytest.mark.slow
def test_intervals_narrow_with_the_runs():
    def reach(profile):
        request = Request(model="llama-3-8b", cluster="h100-sxm-80gb", chips=16, global_batch=64, seq_len=4096, profile=profile)
        setting = setting_of_request(request)
        interval, _ = confidence_in(setting, plan_in(setting, Knobs(fsdp=16)))
        return math.log(interval.high / interval.low), interval.rests_on

    one, many = (perfmodel.fit_runs(runs, profile=BASE).profile for runs in (rows()[1:2], rows()))
    assert reach(many)[0] < reach(one)[0]
    assert reach(many)[1].startswith("5 runs of your own")
    assert reach(one)[1].startswith("1 run of your own")


@pytest.mark.slow
def test_a_run_that_the_others_do_not_explain_is_named_and_not_dropped():
    slow = changed(3, step_time=rows()[3]["step_time"] * 2.0, id="broken")
    fit = perfmodel.fit_runs([*rows()[:3], rows()[4], slow], profile=BASE)
    (outlier,) = fit.outliers
    assert outlier.id == "broken"
    assert "slow link" in outlier.outlier
    assert outlier.weight < 0.5
    assert len(fit.runs) == 5
    alone = perfmodel.fit_runs([*rows()[:3], rows()[4]], profile=BASE)
    assert fit.profile.rates.matmul_rate_fraction == pytest.approx(alone.profile.rates.matmul_rate_fraction, rel=0.06)


def test_an_unknown_setting_is_reported():
    fit = perfmodel.fit_runs([changed(0, settings={"compile": True, "fused_rms": True})], profile=BASE)
    (note,) = (note for note in fit.notes if note.startswith("settings"))
    assert "fused_rms; did you mean 'fused_rmsnorm'" in note


def test_an_unknown_value_is_reported_too():
    fit = perfmodel.fit_runs([changed(0, settings={"compile": "perhaps"})], profile=BASE)
    assert "settings that nothing is known of, passed over: compile=perhaps" in fit.notes


def test_a_fit_starts_from_what_is_predicted_of_a_loop_that_is_not_compiled():
    """`compile=false` writes norms out, whatever their traffic in the profile."""
    asked = {"model": "llama-3-8b", "cluster": "h100-sxm-80gb", "chips": 16, "global_batch": 64, "seq_len": 4096, "fsdp": 16}
    predicted = perfmodel.predict(**asked, micro_batch=1, profile="generic", settings={"compile": False})
    fit = perfmodel.fit_runs({**asked, "micro_batch": 1, "step_time": predicted.step_time}, profile="generic", settings={"compile": False})
    assert fit.error_before == pytest.approx(0.0, abs=2e-3)


@pytest.mark.slow
def test_settings_may_be_given_for_all_runs_and_come_with_their_plan(tmp_path):
    asked = {
        "model": "llama-3-8b",
        "cluster": "h100-sxm-80gb",
        "chips": 16,
        "global_batch": 64,
        "seq_len": 4096,
        "fsdp": 16,
        "micro_batch": 1,
    }
    compiled = perfmodel.predict(**asked, profile="torch-fsdp2", settings={"compile": True})
    write_plan(compiled.plan, tmp_path / "plan.yaml")
    stated = {"framework": "torch-fsdp2", "step_time": compiled.step_time}
    by_plan = perfmodel.fit_runs({**stated, "plan": str(tmp_path / "plan.yaml")})
    by_flag = perfmodel.fit_runs(stated, **asked, settings=["compile"])
    by_row = perfmodel.fit_runs({**stated, "settings": {"compile": "yes"}}, **asked, settings={"compile": False})
    by_name = perfmodel.fit_runs({**stated, "framework": "torch-fsdp2+compile"}, **asked)
    for fit in (by_plan, by_flag, by_row, by_name):
        assert fit.error_before == pytest.approx(0.0, abs=1e-9)


def test_the_next_run_is_a_plan_on_the_same_chips_that_was_not_measured(fit):
    (suggested,) = fit.next_runs
    assert suggested.plan.num_chips == 16
    assert suggested.spread_after < suggested.spread_before
    assert suggested.plan not in {run.plan for run in fit.runs}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([{"dp": 4}], r"chips=16: must equal dp=4 times tp\*pp\*cp=1, which is 4"),
        ([{"tp": 3}], "chips=16: must equal dp=16 times tp=3, which is 48"),
        ([{"dp": None, "tp": 3}], "chips=16: must be a multiple of tp=3"),
        ([{"factor": 1000}], "looks like a time in milliseconds"),
        ([{"factor": 1 / 60}], "looks like a time in minutes"),
        ([{"model": "gpt2", "seq_len": 1024}], "unless its plan is another run's"),
        ([{"framework": "torchtitan"}, {"framework": "nanotron"}], "a profile is of one framework"),
        ([{"step_time": ""}], "none has a step time"),
        ([{"step_time": "soon"}], "step_time='soon': must be a number and a unit"),
        ([{"recompute": "some"}], "recompute=some: not known"),
        ([{"seq_len": None}], "seq_len: is missing"),
        ([{"chip": None}], "chip: is missing"),
        ([], "must be files of measured runs"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_saves_nothing(changes, says, tmp_path):
    runs = [changed(index, **change) for index, change in enumerate(changes)]
    for run in runs:
        run["step_time"] = run["step_time"] * run.pop("factor") if "factor" in run else run["step_time"]
    with pytest.raises(InputError, match=says):
        perfmodel.fit_runs(runs, profile=BASE if len(runs) < 2 else None, save=tmp_path / "mine.yaml")
    assert not (tmp_path / "mine.yaml").exists()
