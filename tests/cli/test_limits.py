"""`perfmodel limits` from outside."""

import pytest

JOB = ["--model", "gpt2", "--cluster", "dgx-h100", "--chips", "2", "--seq-len", "1k"]


def test_the_table_has_the_four_answers(call):
    code, out, err = call("limits", *JOB)
    assert (code, err) == (0, "")
    for text in ("largest micro-batch", "largest batch at once", "longest sequence", "fewest chips", "of a chip usable"):
        assert text in out
    assert "the model has learned 1,024" in out


def test_the_object_is_in_si_units(call_json):
    result = call_json("limits", *JOB, "--recompute", "none", "--global-batch", 64)
    assert result["schema_version"] == 1
    assert (result["chips"], result["seq_len"], result["global_batch"], result["risk"]) == (2, 1024, 64, 0.05)
    answers = result["limits"]
    assert set(answers) == {"micro_batch", "global_batch", "seq_len", "chips"}
    assert (answers["seq_len"]["value"], answers["seq_len"]["limited_by"]) == (1024, "positions")
    assert answers["chips"]["value"] == 1
    assert answers["global_batch"]["limited_by"] == "memory"
    best = answers["micro_batch"]["prediction"]
    assert best["fits"]
    assert best["plan"]["micro_batch"] == answers["micro_batch"]["value"]


def test_rules_and_order_are_held(call_json):
    order = ("dp_shard", "tp", "cp", "dp_replicate", "pp")
    limits = call_json("limits", *JOB, "--rules", "ulysses", "--order", "-".join(order), "--cp", 2, "--recompute", "none")["limits"]
    plans = [limit["prediction"]["plan"] for limit in limits.values() if limit["prediction"]]
    assert {(plan["rules"], tuple(plan["order"])) for plan in plans} == {("ulysses", order)}
    both = call_json("limits", *JOB, "--rules", "megatron,ulysses", "--cp", 2, "--recompute", "none")["limits"]
    assert both["micro_batch"]["value"] >= limits["micro_batch"]["value"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seq-len", "1k", "--cluster", "dgx-h100"], "--model: is missing"),
        (["--seq-len", "1k"], "config.json; --cluster: is missing"),
        (["--model", "gpt2", "--seq-len", "1k"], "--cluster: is missing"),
        (["--model", "gpt2", "--cluster", "dgx-h100"], "--seq-len: is missing"),
        ([*JOB, "--tp", "x"], "tp=x"),
        ([*JOB, "--rules", "ulyses"], "did you mean 'ulysses'"),
        ([*JOB, "--memory-headroom", "100%"], "memory_headroom"),
        ([*JOB, "--global-batch", "many"], "global_batch"),
    ],
)
def test_bad_input_is_one_sentence(call, arguments, sentence):
    code, out, err = call("limits", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
