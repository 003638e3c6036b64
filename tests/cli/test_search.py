"""`perfmodel search`: JSON keys, exit codes and sentences that programs rely on."""

import json
import signal

import pytest

from perfmodel.planner.uniform import sweep as planner_sweep
from perfmodel.verbs import searching
from tests.cli.conftest import JOB, joined, with_flags

SMALL = ["--model", "gpt2", "--cluster", "dgx-h100", "--chips", "8", "--global-batch", "16", "--seq-len", "512"]
#: A search for one framework: the mean of the known ones takes three times as long.
KNOWN, SMALL_KNOWN = [*JOB, "--profile", "megatron"], [*SMALL, "--profile", "megatron"]
TOO_LARGE = ["--model", "gpt3-175b", "--cluster", "dgx-a100", "--chips", "8", "--global-batch", "64", "--seq-len", "2048"]


@pytest.mark.slow
def test_json_has_the_promised_keys(call_json):
    job = with_flags(JOB, "--model", "llama-3-8b")
    result = call_json("search", *job)
    assert set(result) >= {"num_evaluated", "num_feasible", "rejected", "search_time", "plans", "baselines", "pareto", "schema_version"}
    assert result["num_evaluated"] == result["num_feasible"] + sum(result["rejected"].values())
    assert len(result["plans"]) == 10
    first, *times = [plan["step_time"] for plan in result["plans"]]
    assert times == sorted(times)
    assert result["least_time"] <= min(first, *times) <= first <= result["least_time"] * 1.01
    assert [plan["place"] for plan in result["plans"]] == sorted(plan["place"] for plan in result["plans"])
    exact = call_json("search", *job, "--ties", "0%")["plans"]
    assert [plan["step_time"] for plan in exact] == sorted(plan["step_time"] for plan in exact)
    assert exact[0]["step_time"] == result["least_time"]
    assert all(plan["fits"] for plan in result["plans"])
    assert set(result["baselines"]) == {"data parallel", "FSDP", "Megatron rule of thumb"}
    assert all(isinstance(baseline["fits"], bool) for baseline in result["baselines"].values())
    assert result["baselines"]["data parallel"]["fits"] is False
    assert all(plan["plan"]["num_chips"] == 64 for plan in result["plans"])


@pytest.mark.slow
def test_a_plan_of_the_search_is_what_predict_says_of_it(call, call_json, tmp_path):
    best = call_json("search", *KNOWN, "--save", tmp_path / "best.yaml")["plans"][0]
    assert best.pop("place") == 1
    again = call_json("predict", tmp_path / "best.yaml")
    assert {key: again[key] for key in best} == best


def test_a_saved_plan_of_uneven_stages_predicts_again_to_the_bit(call_json, tmp_path):
    """126 layers on 16 ranks of 7 virtual stages: the file holds the layers of each."""
    job = ["--model", "llama-3.1-405b", "--cluster", "dgx-h100", "--chips", "1024", "--global-batch", "512", "--seq-len", "8192"]
    knobs = ["--tp", "8", "--pp", "16", "--virtual-stages", "7", "--zero", "1", "--recompute", "full"]
    best = call_json("search", *job, *knobs, "--top", 1, "--save", tmp_path / "best.yaml")["plans"][0]
    assert sum(best["plan"]["stage_layers"]) == 126
    assert sum(best["plan"]["stage_layers"][::16]) == 7
    again = call_json("predict", tmp_path / "best.yaml")
    assert (again["step_time"], again["memory"]) == (best["step_time"], best["memory"])
    single = call_json("predict", *job, *knobs, "--order", "-".join(best["plan"]["order"]))
    assert (single["step_time"], single["memory"]) == (best["step_time"], best["memory"])


@pytest.mark.parametrize(
    ("flags", "holds"),
    [
        ("--tp 4", lambda plan: plan["layout"]["tp"] == 4),
        ("--zero 1", lambda plan: plan["zero"] == 1),
        ("--max-tp 2 --max-dp-shard 4", lambda plan: plan["layout"]["tp"] <= 2 and plan["layout"]["dp_shard"] <= 4),
        ("--recompute full --micro-batch 1", lambda plan: (plan["recompute"], plan["micro_batch"]) == ("full", 1)),
        ("--schedule interleaved", lambda plan: plan["schedule"] == "interleaved"),
        ("--tp 2 --no-sequence-parallel", lambda plan: not plan["sequence_parallel"]),
        ("--order tp-cp-pp-dp_shard-dp_replicate", lambda plan: plan["order"][2] == "pp"),
        ("--attention unfused", lambda plan: plan["attention"] == "unfused"),
    ],
)
def test_flags_fix_and_bound_knobs(flags, holds, call_json):
    plans = call_json("search", *SMALL_KNOWN, *flags.split())["plans"]
    assert plans
    assert all(holds(plan["plan"]) for plan in plans)


@pytest.mark.slow
def test_top_and_objective(call_json):
    plans = call_json("search", *KNOWN, "--objective", "memory", "--top", 3, "--ties", 0)["plans"]
    assert len(plans) == 3
    totals = [plan["memory"]["total"] for plan in plans]
    assert totals == sorted(totals)


@pytest.mark.slow
def test_nothing_fits_is_exit_code_2_with_the_least_memory_and_a_way_out(call):
    code, out, err = call("search", *TOO_LARGE, "--json")
    result = json.loads(out)
    assert code == 2
    assert (result["num_feasible"], result["plans"]) == (0, [])
    assert result["least_memory"]["memory"]["total"] > 80e9
    assert err.count("\n") == 1
    assert "no plan fits: the least that any of" in err
    assert "chips would be enough" in err
    code, out, err = call("search", *TOO_LARGE)
    assert code == 2
    assert "data parallel" in out
    assert "does not fit" in out


def test_nothing_is_saved_when_nothing_fits(call, tmp_path):
    assert call("search", *TOO_LARGE, "--save", "best.yaml")[0] == 2
    assert not (tmp_path / "best.yaml").exists()


@pytest.mark.slow
def test_what_was_there_before_is_not_called_the_best_plan(call, tmp_path):
    for name in ("best.yaml", "best.png"):
        (tmp_path / name).write_text("before")
    _, out, _ = call("search", *TOO_LARGE, "--save", "best.yaml", "--plot", "best.png")
    assert "best plan:" not in out
    assert "figure:" not in out
    assert (tmp_path / "best.yaml").read_text() == (tmp_path / "best.png").read_text() == "before"
    _, out, _ = call("search", *SMALL_KNOWN, "--save", "best.yaml", "--plot", "best.png")
    assert out.endswith("\nfigure: best.png\n\nbest plan: best.yaml\n")


@pytest.mark.slow
def test_a_figure_of_several_numbers_of_chips_has_all_of_them(call, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("perfmodel.report.figures.write_figure", lambda figure, path: drawn.append(figure))
    _, out, _ = call("search", *SMALL_KNOWN, "--chips", "4,8,16", "--plot", "all.png")
    assert [list(axes.lines[0].get_xdata()) for axes in drawn[0].axes] == [[4, 8, 16]] * 2
    assert "figure: all.png" in out


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tp", "3"], "tp=3: must divide chips=64"),
        (["--tp", "0"], "tp=0"),
        (["--max-tp", "0"], "tp=0"),
        (["--zero", "5"], "zero=5"),
        (["--objective", "luck"], "objective=luck"),
        (["--top", "0"], "top=0"),
        (["--recompute", "some"], "recompute=some"),
        (["--dp-replicate", "64", "--zero", "3"], "no plan"),
        (["--cluster", "no-such"], "cluster=no-such"),
    ],
)
def test_bad_input_is_one_sentence(flags, expected, call):
    code, out, err = call("search", *JOB, *flags)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_several_clusters_give_one_table(call, call_json):
    flags = [*SMALL_KNOWN, "--cluster", "dgx-a100", "--chips", "8,16"]
    searches = call_json("search", *flags)["searches"]
    assert [(search["cluster"], search["chips"]) for search in searches] == [
        ("dgx-h100", 8),
        ("dgx-h100", 16),
        ("dgx-a100", 8),
        ("dgx-a100", 16),
    ]
    code, out, err = call("search", *flags)
    assert (code, err) == (0, "")
    assert "the best plan of each" in out


def test_a_person_reads_the_best_the_baselines_and_why_not_the_others(call):
    code, out, err = call("search", *with_flags(KNOWN, "--model", "llama-3-8b"), "--top", "5", "--verbose")
    assert (code, err) == (0, "")
    for piece in (
        "plans evaluated",
        "fit in 79.1 GiB usable at a risk of 5.0 % of running out of memory",
        "data parallel",
        "FSDP",
        "Megatron rule of thumb",
        "does not fit",
        "in every row",
    ):
        assert piece in joined(out)


WIDE = ["--model", "llama-3-8b", "--cluster", "gb200-nvl72", "--chips", "64", "--global-batch", "64", "--seq-len", "1024", "--top", "2"]
WIDE += ["--profile", "torch-fsdp2"]


def test_plans_that_torch_cannot_execute_say_so_in_json_and_carry_no_mark(call, call_json):
    result = call_json("search", *WIDE, "--tp", "8", "--precision", "fp16-mixed")
    reason = result["plans"][0]["not_executable_reason"]
    assert reason.startswith("precision=fp16-mixed: needs dynamic loss scaling")
    assert not any(plan["executable"] for plan in result["plans"])
    assert result["baselines"]["FSDP"] == {"fits": False, "reason": "excluded by a given flag"}
    _, out, _ = call("search", *WIDE, "--tp", "8", "--precision", "fp16-mixed")
    assert "cannot be run" not in out
    assert "\n1* " not in out


def test_plans_that_torch_can_execute_have_no_reason(call, call_json):
    result = call_json("search", *WIDE, "--tp", "8")
    assert all(plan["executable"] and plan["not_executable_reason"] == "" for plan in (*result["plans"], *result["pareto"]))
    assert "cannot be run" not in call("search", *WIDE, "--tp", "8")[1]


def test_an_interrupted_search_shows_the_best_so_far(call, monkeypatch):
    evaluated = 0
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    original = planner_sweep.evaluate_rows
    monkeypatch.setattr(searching, "search_in", searching.search_in.__wrapped__)  # not one of the kept results

    def interrupted(*arguments):
        nonlocal evaluated
        evaluated += 1
        if evaluated == 4:
            signal.raise_signal(signal.SIGINT)
        original(*arguments)

    monkeypatch.setattr(planner_sweep, "evaluate_rows", interrupted)
    code, out, _ = call("search", *SMALL_KNOWN)
    assert code == 130
    assert "interrupted; the best so far" in out
    assert "The best plan" in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_long_work_shows_a_bar_on_a_terminal_and_leaves_nothing_behind(monkeypatch, capsys):
    from perfmodel.cli import output

    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(output.sys.stderr, "isatty", lambda: True, raising=False)
    with output.Progress("search") as progress:
        for tenth in range(5):
            progress.share(tenth / 10)
    out, err = capsys.readouterr()
    assert out == ""
    assert "search [############..................]  40%" in err
    assert err.endswith(" \r")


def test_long_work_prints_a_line_now_and_then_elsewhere(monkeypatch, capsys):
    from perfmodel.cli import output

    clock = iter(float(second) for second in range(100))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))
    with output.Progress("demo") as progress:
        for step in range(20):
            progress.step(step / 20, "kernels")
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert lines[0].startswith("demo (kernels) [")


def test_the_rate_of_a_small_search_is_not_none_at_all(call):
    from dataclasses import replace

    import perfmodel
    from perfmodel.report.searches import search_line

    search = perfmodel.find_plans(model="gpt2", cluster="dgx-h100", chips=8, global_batch=16, seq_len=512, profile="megatron")
    assert "41 thousand a second" in search_line(replace(search, num_evaluated=4100, search_time=0.1))
    assert "4.1 million a second" in search_line(replace(search, num_evaluated=410_000, search_time=0.1))
    assert "a second" not in search_line(replace(search, num_evaluated=41, search_time=0.1))


@pytest.mark.slow
def test_baselines_obey_the_flags(call_json):
    result = call_json("search", *JOB, "--max-zero", 1)
    assert result["baselines"]["FSDP"] == {"fits": False, "reason": "excluded by a given flag"}
    rule = result["baselines"]["Megatron rule of thumb"]
    assert rule["plan"]["recompute"] == "none"
    assert rule["step_time"] >= result["least_time"]


@pytest.mark.slow
def test_several_values_of_anything_are_one_table(call, call_json):
    flags = with_flags(SMALL, "--seq-len", "256,512", "--profile", "megatron,torchtitan", "--chips", "8,12", "--top", "1")
    content = call_json("search", *flags)
    assert [(search["seq_len"], search["profile"], search["chips"]) for search in content["searches"]] == [
        (256, "megatron", 8),
        (256, "torchtitan", 8),
        (512, "megatron", 8),
        (512, "torchtitan", 8),
    ]
    assert {case["chips"] for case in content["not_searched"]} == {12}
    code, out, err = call("search", *flags)
    assert (code, err) == (0, "")
    header = next(line for line in out.splitlines() if line.strip().startswith("seq"))
    assert header.split()[:2] == ["seq", "framework"]
    assert "not searched: " in out


def test_dp_fixes_the_product_of_both_data_parallel_degrees(call_json):
    plans = call_json("search", *SMALL_KNOWN, "--dp", "4")["plans"]
    assert {plan["plan"]["layout"]["dp_replicate"] * plan["plan"]["layout"]["dp_shard"] for plan in plans} == {4}
    assert len({plan["plan"]["layout"]["dp_shard"] for plan in plans}) > 1
    assert {plan["plan"]["layout"]["dp_shard"] for plan in call_json("search", *SMALL, "--fsdp", "8")["plans"]} == {8}


@pytest.mark.slow
def test_the_framework_and_the_basis_of_the_numbers_come_first(call):
    facts = joined(call("search", *SMALL)[1].partition("Best plans")[0])
    assert " framework generic (not given: the mean of the known ones; " in facts
    assert " based on calibrated: h100 " in facts


def test_plans_and_baselines_as_csv(call):
    import csv

    code, out, _ = call("search", *SMALL, "--top", "2", "--csv", "-")
    rows = list(csv.DictReader(out.splitlines()))
    assert code == 0
    assert [row["place"] for row in rows][2:] == ["data parallel", "FSDP", "Megatron rule of thumb"]
    assert all(float(row["tflops_per_chip"]) > 0 for row in rows)


@pytest.mark.slow
def test_plans_that_the_framework_cannot_run_are_left_out_unless_they_are_asked_for(call, call_json):
    some = call_json("search", *KNOWN)
    assert some["plans"]
    assert all(plan["runnable"] for plan in some["plans"])
    assert some["baselines"]["FSDP"] == {"fits": False, "reason": "not what the framework runs"}
    assert call_json("search", *KNOWN, "--only-runnable")["plans"] == some["plans"]
    starred = call_json("search", *KNOWN, "--any-framework")
    assert not all(plan["runnable"] for plan in starred["plans"])
    assert starred["any_framework"] == {}
    assert some["num_evaluated"] < starred["num_evaluated"]
    assert "not a plan for this framework: zero=" in call("search", *KNOWN, "--any-framework")[1]


def test_one_line_has_the_gain_of_plans_outside_the_framework(call, call_json):
    job = ["--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--chips", "8", "--global-batch", "64", "--seq-len", "8k"]
    job += ["--profile", "torchtitan", "--max-tp", "2", "--pp", "1", "--cp", "1", "--risk", "30%"]
    result = call_json("search", *job)
    beyond = result["any_framework"]
    assert result["plans"][0]["runnable"]
    assert not beyond["runnable"]
    assert beyond["fits"]
    assert beyond["step_time"] < result["plans"][0]["step_time"]
    (line,) = (note for note in joined(call("search", *job)[1]).split("note: ") if note.startswith("--any-framework: "))
    assert "% faster" in line
    assert "zero=1: torchtitan has ZeRO 0, 2 and 3 only" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--zero", "3"], "zero=3: megatron has ZeRO 0 and 1 only"),
        (["--only-runnable", "--any-framework"], "any_framework=true: contradicts only_runnable=true"),
    ],
)
def test_what_the_framework_cannot_run_is_refused_with_the_flag_that_lifts_it(arguments, expected, call):
    code, out, err = call("search", *SMALL, "--profile", "megatron", *arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert "any_framework" in err or "--any-framework" in err


@pytest.mark.slow
def test_a_risk_limits_the_plans_and_more_certainty_has_its_price(call, call_json):
    job = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--chips", 8, "--global-batch", 32, "--seq-len", 8192, "--tp", 2]
    job += ["--profile", "megatron"]
    result = call_json("search", *job, "--risk", "5%")
    assert result["risk"] == 0.05
    assert all(plan["fits_probability"] >= 0.95 for plan in result["plans"])
    assert [level["risk"] for level in result["certainty"]] == [0.2, 0.05, 0.01]
    times = [level["step_time"] for level in result["certainty"]]
    assert times == sorted(times)
    assert result["num_feasible"] == call_json("search", *job)["num_feasible"], "the default"
    assert result["num_feasible"] < call_json("search", *job, "--risk", "20%")["num_feasible"]
    code, out, err = call("search", *job, "--risk", "5%", "--top", 1, "--verbose")
    assert (code, err) == (0, "")
    assert "usable at a risk of 5.0 % of running out of memory" in joined(out)
    assert "Fastest plan at each risk of running out of memory" in out


def test_predict_takes_the_same_risk_and_has_five_percent_by_default(call_json):
    """A plan that fits into the memory with 46 %."""
    job = ("--model", "llama-3-70b", "--cluster", "dgx-h100", "--gpus", 64, "--gbs", 512, "--seq", "8k", "--profile", "megatron")
    plan = ("--tp", 4, "--pp", 4, "--cp", 2, "--dp-shard", 2, "--zero", 1, "--no-sequence-parallel")
    predictions = {risk: call_json("predict", *job, *plan, "--risk", risk) for risk in ("60%", "5%")}
    assert {risk: prediction["verdict"] for risk, prediction in predictions.items()} == {"60%": "fits", "5%": "tight"}
    assert len({prediction["step_time"] for prediction in predictions.values()}) == 1
    assert call_json("predict", *job, *plan)["verdict"] == "tight"


@pytest.mark.parametrize("risk", ["0", "100%", "five"])
def test_a_risk_is_a_probability(call, risk):
    code, _, err = call(
        "search", "--model", "gpt2", "--cluster", "dgx-a100", "--chips", 8, "--global-batch", 8, "--seq-len", 1024, "--risk", risk
    )
    assert code == 2
    assert "risk=" in err


def test_a_framework_that_has_ulysses_alone_is_searched_with_it(call_json):
    job = ["--model", "qwen2.5-7b", "--cluster", "dgx-h100", "--chips", 8, "--global-batch", 128, "--seq-len", "32k"]
    best = call_json("search", *job, "--profile", "verl-fsdp", "--top", 1)["plans"][0]
    assert best["fits"]
    assert best["plan"]["layout"]["cp"] > 1
    assert best["plan"]["rule_set"] == "ulysses"


@pytest.mark.slow
def test_the_step_time_of_a_chip_without_kernel_tables_has_its_interval_unasked(call, call_json):
    job = ["--model", "gpt2", "--chips", "8", "--global-batch", "16", "--seq-len", "512", "--top", 2, "--max-pp", 1, "--max-cp", 1]
    for cluster, shown in ((("--chip", "l40s"), True), (("--cluster", "dgx-h100"), False)):
        code, out, err = call("search", *cluster, *job)
        assert (code, err) == (0, "")
        assert any(line.startswith("80% interval") for line in out.splitlines()) is shown
        for plan in call_json("search", *cluster, *job)["plans"]:
            assert ("step_time_low" in plan) is shown
            assert not shown or plan["step_time_low"] < plan["step_time"] < plan["step_time_high"]


def test_a_search_prints_the_warnings_of_its_best_plan(call):
    job = ("--model", "llama-3-8b", "--cluster", "dgx-h100", "--chips", 8, "--profile", "megatron", "--top", 1)
    _, out, _ = call("search", *job, "--seq-len", "16k", "--global-batch", 8)
    assert "seq_len=16384 is beyond the 8192 positions of llama-3-8b" in " ".join(out.split())
    _, out, _ = call("search", *job, "--seq-len", "1M", "--global-batch", 1)
    assert "is beyond the 8192 positions" in " ".join(out.split()), "also where nothing fits"
