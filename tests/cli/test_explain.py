"""`perfmodel explain | compare`."""

import re

import pytest

from perfmodel.parallel.plan_file import list_plans
from tests.cli.conftest import joined


def test_why_not_is_answered_in_numbers(call, call_json):
    code, out, err = call("explain", "megatron-175b", "--why-not", "tp=16,pp=2")
    assert (code, err) == (0, "")
    assert out.startswith("Why not tp=16, pp=2: ")
    assert " s against " in joined(out.partition("\n\n")[0])
    content = call_json("explain", "megatron-175b", "--why-not", "tp=16,pp=2", "--why-not", "tp=1,pp=1,zero=0")
    first, second = content["why_not"]
    assert first["prediction"]["plan"]["layout"]["tp"] == 16
    assert second["prediction"]["fits"] is False
    assert "too much" in second["reason"]


def test_the_answer_to_what_cannot_be_is_the_rule(call):
    code, out, _ = call("explain", "megatron-175b", "--why-not", "tp=7")
    assert code == 0
    assert "no such plan: pp*tp=56: must divide chips=64" in out


def test_neighbours_and_bottleneck(call, call_json):
    content = call_json("explain", "fsdp")
    assert content["bottleneck"] == "backward"
    assert any(neighbour["knobs"] == {"recompute": "none"} for neighbour in content["neighbours"])
    assert "One knob changed" in call("explain", "fsdp")[1]


@pytest.mark.slow
def test_experts_are_sharded_over_more_and_fewer_ranks(call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    job = "--model qwen3-30b-a3b --cluster dgx-h100 --chips 16 --global-batch 64 --seq-len 4096 --profile megatron --ep 8 --zero 1"
    call_json("predict", *job.split(), "--save", str(path))
    turned = [neighbour["knobs"] for neighbour in call_json("explain", str(path))["neighbours"]]
    assert [knobs["ep"] for knobs in turned if "ep" in knobs] == [16, 4]
    assert {"dispatcher": "allgather"} in turned


@pytest.mark.parametrize("typed", ["explain --tp 2", "compare --gpus 8", "run plan.yaml --tp 2"])
def test_what_takes_a_plan_says_how_to_get_one(typed, call):
    code, _, err = call(*typed.split())
    verb, flag = typed.split()[0], typed.split()[-2]
    assert code == 2
    assert (
        f"No such option: {flag} ({verb} reads it from a plan file; write one with `perfmodel predict {flag} ... --save plan.yaml`" in err
    )
    assert "Possible options: --why-not" in call("explain", "--why-no", "tp=2")[2]


def test_neighbours_of_a_plan_with_uneven_stages(call, call_json):
    """126 layers on 16 ranks; a reason of the one that cannot be breaks into lines."""
    neighbours = call_json("explain", "llama-3.1-405b")["neighbours"]
    without = [neighbour for neighbour in neighbours if not neighbour["prediction"]]
    assert [neighbour["knobs"] for neighbour in without] == [{"micro_batch": 2}]
    assert "the number of microbatches 8 must be a multiple of pp=16" in without[0]["reason"]
    same = next(neighbour for neighbour in neighbours if neighbour["knobs"] == {"recompute": "selective"})
    assert same["prediction"]["plan"]["stage_layers"] == [0, *[1] * 126, 0]
    table = call("explain", "llama-3.1-405b")[1].partition("One knob changed")[2]
    assert max(map(len, table.splitlines())) <= 100


def test_why_not_what_the_plan_has_or_would_be_better(call):
    """Nothing is called worse that is better, and nothing is asked of the plan that it is."""
    _, out, _ = call("explain", "megatron-175b", "--risk", "30%", "--why-not", "tp=8", "--why-not", "tp=4", "--why-not", "tp=1")
    same, better, worse = (f"Why not {text}" for text in joined(out.partition("\n\n")[0]).split("Why not ")[1:])
    assert same.startswith("Why not tp=8: the plan has that; the best such plan is ")
    assert better.startswith("Why not tp=4: alone it needs 122 GiB and does not fit; the best such plan would be better: ")
    assert " % faster (" in better
    assert re.search(r"\([\d.]+ s against [\d.]+ s\), mostly ", better)
    assert ", with pp=" in better
    assert ", virtual_stages=" in better
    assert " % slower (" in worse
    assert "better" not in worse


def test_the_knob_alone_is_compared_first_and_its_part_is_named(call, call_json, tmp_path):
    path = tmp_path / "plan.yaml"
    job = "--model llama-3-8b --cluster dgx-h100 --chips 16 --global-batch 64 --seq-len 4k --zero 1 --tp 2"
    call_json("predict", *job.split(), "--save", str(path))
    zero_3, more = call_json("explain", str(path), "--why-not", "zero=3", "--why-not", "micro_batch=8")["why_not"]
    assert zero_3["changed"] == {}
    assert re.match(
        r"zero=3: [\d.]+ % slower \([^)]*\), mostly parameter gather .*; the best such plan would be better: ", zero_3["reason"]
    )
    assert zero_3["slower_by"] > 0
    assert more["prediction"]["fits"]
    assert re.match(r"micro_batch=8: alone it needs .* GiB and does not fit; the best such plan is ", more["reason"])
    assert more["changed"]


@pytest.mark.slow
def test_every_knob_that_a_neighbour_changes_is_listed_and_the_framework_can_run_it(call, call_json):
    """Fewer tp ranks keep ZeRO 1; where other knobs change, the row names them."""
    answer = call_json("explain", "megatron-175b", "--why-not", "tp=4", "--why-not", "zero=3")
    plan = answer["plan"]
    knobs = ("micro_batch", "zero", "recompute", "schedule", "virtual_stages", "sequence_parallel")
    for answered in (*answer["neighbours"], answer["why_not"][0]):
        other = answered["prediction"].get("plan")
        if other:
            assert answered["prediction"]["runnable"]
            differ = {knob for knob in knobs if other[knob] != plan[knob]}
            assert differ <= {*answered["knobs"], *answered["changed"]}
    turned = next(neighbour for neighbour in answer["neighbours"] if neighbour["knobs"] == {"tp": 4})
    assert turned["prediction"]["plan"]["zero"] == plan["zero"]
    refused = answer["why_not"][1]
    assert refused["prediction"] == {}
    assert "zero=3: megatron has ZeRO 0 and 1 only" in refused["reason"]
    lifted = call_json("explain", "megatron-175b", "--why-not", "zero=3", "--any-framework")["why_not"][0]
    assert lifted["prediction"]["plan"]["zero"] == 3


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["ddp", "--why-not", "tp=2,tp=4"], "tp is given twice"),
        (["no-such-plan"], "plan=no-such-plan"),
        (["ddp", "--why-not", "speed=11"], "'speed' is not a knob"),
        (["ddp", "--why-not", "tp"], "must be knob=value"),
        (["ddp", "--why-not", "tp=0"], "tp must be a whole number"),
    ],
)
def test_bad_input_is_one_sentence(arguments, expected, call):
    code, out, err = call("explain", *arguments)
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


def test_plans_side_by_side(call, call_json):
    code, out, err = call("compare", "ddp", "fsdp")
    assert (code, err) == (0, "")
    for piece in ("step time", "Knobs that differ", "gpt2-xl", "llama-3-8b", "dp shard"):
        assert piece in out
    content = call_json("compare", *list_plans())
    assert [row["file"] for row in content["plans"]] == list_plans()
    assert all(row["step_time"] > 0 for row in content["plans"])


def test_one_plan_is_no_comparison(call):
    code, out, err = call("compare", "ddp")
    assert (code, out) == (2, "")
    assert "at least two" in err


def test_different_jobs_are_compared_by_throughput(call, call_json):
    out = call("compare", "megatron-22b", "fsdp")[1]
    assert "these plans run different jobs" in out
    assert "against the most" in out
    assert "against the fastest" not in out
    assert call_json("compare", "megatron-22b", "fsdp")["same_job"] is False
    assert call_json("compare", "fsdp", "fsdp")["same_job"] is True
    assert "against the fastest" in call("compare", "fsdp", "fsdp")[1]


@pytest.mark.slow
def test_plans_whose_steps_have_other_parts_are_compared(call, tmp_path):
    job = ("--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--chips", "64", "--global-batch", "64", "--seq-len", "4096", "--ep", "8")
    assert call("predict", *job, "--zero", "1", "--save", "experts.yaml")[0] == 0
    for names in (("experts.yaml", "fsdp"), ("fsdp", "experts.yaml")):
        code, out, err = call("compare", *names)
        assert (code, err) == (0, "")
        assert "expert parallel communication" in out


def test_trust_says_what_carries_the_uncertainty_and_what_would_halve_it(call, call_json):
    explanation = call_json("explain", "fsdp", "--trust", "--profile", "generic")
    trust = explanation["trust"]
    assert trust["grade"] == "framework unknown"
    assert trust["interval"][0] < explanation["step_time"] < trust["interval"][1]
    assert sum(source["share"] for source in trust["doubts"]) == pytest.approx(1.0)
    assert trust["cheapest"] in trust["remedies"]
    code, out, err = call("explain", "fsdp", "--trust", "--profile", "generic")
    assert (code, err) == (0, "")
    # The column may fold.
    assert all(words in out for words in ("measure 3 runs", "and its", "neighbours"))
    assert "Sources of uncertainty of the step time" in out
    assert "trust" not in call_json("explain", "fsdp")


def test_flags_put_a_plan_in_another_place(call_json):
    plan = call_json("explain", "fsdp", "--chips", 16, "--seq-len", 2048)["plan"]
    assert (plan["num_chips"], plan["job"]["seq_len"]) == (16, 2048)
