"""Remedies where a plan does not fit: every remedy, followed, fits and can be run by the framework."""

import json

import pytest

import perfmodel
from perfmodel.parallel.framework_ref import flags_text

LLAMA = "--model llama-3-70b --cluster dgx-h100 --chips 64 --gbs 512 --seq 8k"


def flags_of(text):
    """Flag -> value, empty where it has none."""
    flags = {}
    for word in text.split():
        if word.startswith("--"):
            flag = word
            flags[flag] = ""
        else:
            flags[flag] = word
    return flags


def words_of(flags):
    return [word for flag, value in flags.items() for word in (flag, value) if word]


def search_in_vain(call, *words):
    code, out, _ = call("search", *words, "--json")
    assert code == 2
    return json.loads(out)


@pytest.mark.parametrize("plan", ["--profile megatron --tp 4 --pp 2 --zero 1", "--profile torchtitan --dp-shard 64 --zero 3"])
@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_shown_with_changes_that_do(plan, call_json, call):
    given = f"{LLAMA} {plan}"
    prediction = call_json("predict", *given.split())
    assert not prediction["fits"]
    assert 1 <= len(prediction["remedies"]) <= 3
    for remedy in prediction["remedies"]:
        again = call_json("predict", *words_of(flags_of(given) | flags_of(remedy["flags"])))
        assert again["fits"]
        assert again["runnable"]
        assert again["step_time"] == pytest.approx(remedy["step_time"])
        assert again["memory"]["total"] == pytest.approx(remedy["memory"])
    out = call("predict", *given.split())[1]
    assert "Smallest changes that fit" in out
    assert prediction["remedies"][0]["flags"] in out


@pytest.mark.slow
def test_offload_is_among_the_changes_where_the_framework_has_it(call_json):
    plan, offload = "--profile deepspeed --zero 1 --recompute full --chips 4", "optimizer"
    given = f"--model llama-2-13b --cluster dgx-h100 --gbs 64 --seq 4k {plan}"
    prediction = call_json("predict", *given.split())
    assert not prediction["fits"]
    (remedy,) = (change for change in prediction["remedies"] if "offload" in change["changes"])
    assert remedy["flags"] == f"--offload {offload}"
    again = call_json("predict", *words_of(flags_of(given) | flags_of(remedy["flags"])))
    assert again["fits"]
    assert again["step_time"] == pytest.approx(remedy["step_time"])


@pytest.mark.parametrize(("chips", "offload"), [(2, "optimizer,parameters"), (8, "optimizer")])
def test_an_offload_is_combined_with_a_smaller_loss_and_with_knobs(chips, offload, call_json):
    given = f"--model qwen2.5-7b --cluster dgx-h100 --chips {chips} --gbs {chips} --seq 120k --profile llama-factory --recompute none"
    prediction = call_json("predict", *given.split())
    remedy = prediction["remedies"][0]
    assert remedy["changes"].items() >= {"setting": "loss=fused", "offload": offload, "recompute": "full", "zero": 3}.items()
    again = call_json("predict", *words_of(flags_of(given) | flags_of(remedy["flags"])))
    assert again["fits"]
    assert again["step_time"] == pytest.approx(remedy["step_time"])


def test_an_offload_that_was_given_is_kept(call_json):
    given = "--model qwen2.5-7b --cluster dgx-h100 --chips 2 --gbs 2 --seq 120k --profile llama-factory --zero 3 --offload optimizer"
    prediction = call_json("predict", *f"{given} --recompute full --setting loss=fused".split())
    (remedy,) = (change for change in prediction["remedies"] if "offload" in change["changes"])
    assert remedy["changes"] == {"offload": "optimizer,parameters"}


def test_megatron_keeps_float32_gradients_on_the_chip_so_no_offload_is_suggested(call_json):
    given = "--model llama-2-13b --cluster dgx-h100 --gbs 64 --seq 4k --profile megatron --zero 1 --recompute full --chips 8"
    prediction = call_json("predict", *given.split())
    assert prediction["remedies"]
    assert not [remedy for remedy in prediction["remedies"] if "offload" in remedy["changes"]]


@pytest.mark.slow
def test_search_and_limits_name_the_same_fewest_chips(call, call_json):
    job = words_of(flags_of("--model llama-3.1-405b --cluster dgx-h100 --chips 8 --gbs 64 --seq 8k"))
    (remedy,) = search_in_vain(call, *job)["remedies"]
    assert remedy["changes"]["chips"] == call_json("limits", *job)["limits"]["chips"]["value"]


def test_a_search_in_which_nothing_fits_names_what_to_free(call, call_json):
    given = flags_of(f"{LLAMA} --profile megatron --tp 1 --pp 1")
    result = search_in_vain(call, *words_of(given))
    assert result["plans"] == []
    assert {tuple(remedy["changes"]) for remedy in result["remedies"]} >= {("tp",), ("pp",)}
    for remedy in result["remedies"]:
        assert call_json("search", *words_of(given | flags_of(remedy["flags"])))["plans"]


@pytest.mark.parametrize(
    ("chips", "flag"),
    [pytest.param(64, "chips", id="more chips, where none fits on these"), pytest.param(256, "ep", id="experts over chips")],
)
@pytest.mark.slow
def test_a_model_with_experts_gets_changes_of_expert_parallelism(chips, flag, call_json):
    cluster = "gb200-nvl72" if chips == 64 else "dgx-h100"
    job = ("--model", "deepseek-v3", "--cluster", cluster, "--gbs", 1024, "--seq-len", "4k", "--profile", "megatron")
    remedies = call_json("predict", *job, "--chips", chips)["remedies"]
    assert remedies
    assert all(flag in remedy["changes"] and remedy["fits_probability"] >= 0.95 for remedy in remedies)


def test_a_plan_that_fits_has_no_remedies(call_json):
    fits = call_json("predict", *words_of(flags_of("--model gpt2 --cluster dgx-h100 --chips 8 --gbs 8 --seq 1k")))
    assert fits["fits"]
    assert "remedies" not in fits


def test_explain_ends_with_what_would_fit():
    plan = perfmodel.predict(
        model="llama-3-70b", cluster="dgx-h100", chips=64, global_batch=512, seq_len=8192, tp=4, pp=2, zero=1, profile="megatron"
    ).plan
    remedies = perfmodel.explain_plan(plan).remedies
    assert remedies
    assert all(remedy.prediction.fits and not remedy.prediction.not_runnable for remedy in remedies)
    assert flags_text(remedies[0].changes).startswith("--")


@pytest.mark.parametrize(
    ("given", "loss", "more"),
    [
        ("--model qwen2.5-0.5b --chip a100-sxm-80gb --chips 1 --gbs 1 --seq 128k --train qlora:16", "chunked", {"recompute": "full"}),
        (
            "--model gemma-3-4b --cluster dgx-h100 --chips 8 --gbs 8 --seq 64k --zero 3 --recompute full --profile llama-factory",
            "fused",
            {},
        ),
    ],
)
@pytest.mark.slow
def test_a_loss_that_keeps_few_logits_is_among_the_changes(given, loss, more, call_json):
    prediction = call_json("predict", *given.split())
    assert not prediction["fits"]
    (remedy,) = (change for change in prediction["remedies"] if "setting" in change["changes"])
    assert remedy["changes"] == {"setting": f"loss={loss}"} | more
    again = call_json("predict", *words_of(flags_of(given) | flags_of(remedy["flags"])))
    assert again["fits"]
    assert again["step_time"] == pytest.approx(remedy["step_time"])


def test_a_search_without_a_plan_tries_such_a_loss(call, call_json):
    job = flags_of("--model qwen2.5-0.5b --chip a100-sxm-80gb --chips 1 --gbs 1 --seq 128k --recompute full")
    remedy, more_chips = search_in_vain(call, *words_of(job))["remedies"]
    assert remedy["changes"] == {"setting": "loss=chunked"}
    assert more_chips["changes"] == {"chips": 8}
    assert call_json("search", *words_of(job | flags_of(remedy["flags"])))["plans"]


def test_megatron_has_no_loss_in_chunks(call_json):
    given = "--model gemma-3-4b --cluster dgx-h100 --chips 8 --gbs 8 --seq 64k --recompute full --zero 1 --profile megatron"
    assert not [remedy for remedy in call_json("predict", *given.split()).get("remedies", ()) if "setting" in remedy["changes"]]


@pytest.mark.parametrize(
    ("train", "advice"), [("full", "--train lora:16."), ("lora:8", "--train qlora:8."), ("qlora:8", "or shorter sequences.")]
)
@pytest.mark.slow
def test_where_more_chips_are_the_only_change_a_lighter_training_is_named_if_there_is_one(train, advice, call):
    out = call("predict", *f"--model llama-3-70b --chip rtx3080-10gb --chips 1 --gbs 1 --seq 512 --train {train}".split())[1]
    assert " ".join(out.split()).partition("In place of more chips")[2].partition("note:")[0].strip().endswith(advice)


def test_few_logits_are_not_called_the_reason(call):
    given = flags_of("--model llama-2-7b --chip rtx3080-10gb --chips 1 --gbs 1 --seq 512 --train lora:16")
    assert "peaks at the loss" not in call("predict", *words_of(given))[1]


@pytest.mark.parametrize(
    ("profile", "form"),
    [("generic", "chunked"), ("torchtitan", "chunked"), ("hf-trainer", "fused"), ("llama-factory", "fused"), ("megatron", "")],
)
@pytest.mark.slow
def test_the_note_on_logits_names_a_loss_that_the_framework_has(profile, form, call):
    given = f"--model gemma-3-4b --cluster dgx-h100 --chips 8 --gbs 8 --seq 64k --recompute full --zero 1 --profile {profile}"
    note = " ".join(call("predict", *given.split())[1].split()).partition("peaks at the loss")[2]
    assert "32 GiB of logits" in note
    assert note.endswith(f"(--setting loss={form})" if form else "copies aside")


def test_no_remedy_puts_more_into_the_hosts_memory_than_servers_have(call, call_json):
    """Activations of 64k tokens without recomputation are 284 GiB a chip: they would fit nowhere."""
    given = "--model qwen3-8b --cluster dgx-h100 --chips 8 --gbs 32 --seq 64k --train lora:16:q_proj+v_proj --profile hf-trainer"
    prediction = call_json("predict", *given.split(), "--recompute", "full")
    assert prediction["remedies"]
    assert all("offload" not in remedy["changes"] for remedy in prediction["remedies"])
    held = call_json("predict", *given.split(), "--setting", "loss=fused", "--offload", "activations")
    assert held["host_memory"] > 250e9
    assert any("more than a server with 2 TB has for each of eight" in note for note in held["warnings"])


def test_a_search_in_vain_offers_the_offload_that_the_trainer_has(call):
    """trl PR 6846: Qwen3-8B at a million tokens on one node."""
    given = "--model qwen3-8b --cluster dgx-h100 --chips 8 --gbs 1 --seq 1M --profile hf-trainer --setting loss=chunked"
    code, _, error = call("search", *given.split())
    assert code == 2
    assert "--offload activations would fit" in error
