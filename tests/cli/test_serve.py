"""`perfmodel serve` from the command line."""

import csv
import json
import re

import pytest

import perfmodel
from perfmodel.report.figures import front_figure
from tests.cli.conftest import joined

JOB = ["--model", "llama-3.3-70b", "--cluster", "dgx-h100", "--chips", "8", "--input-len", "1k", "--output-len", "1k"]
LLAMA = ["serve", *JOB, "--concurrency", "64"]


def test_one_object(call_json):
    service = call_json(*LLAMA)
    asked = {"ttft", "tpot", "request_latency", "tokens_per_second_per_chip", "max_sequences", "memory", "parts", "plan", "rests_on"}
    assert asked <= set(service)
    assert service["tpot"]["mean"] * 1023 + service["ttft"]["mean"] == pytest.approx(service["request_latency"]["mean"])
    assert sum(service["parts"].values()) == pytest.approx(service["decode_step"])
    served = perfmodel.serve(model="llama-3.3-70b", cluster="dgx-h100", chips=8, input_len=1024, output_len=1024, concurrency=64)
    assert served.tpot.mean == service["tpot"]["mean"]


def test_what_people_read(call):
    code, text, error = call(*LLAMA)
    assert (code, error) == (0, "")
    for words in ("TTFT", "TPOT", "80 % interval", "sequences of mean length fit", "Where a decode step", "Memory of a chip", "not given"):
        assert words in text


def test_what_does_not_fit_is_not_started(call):
    asked = "--model llama-3.1-405b --cluster dgx-h100 --chips 4 --input-len 1k --output-len 1k"
    code, text, _ = call("serve", *asked.split())
    assert code == 2
    assert text.startswith("does not fit: weights take")
    assert "tp: not given; 4 leaves the most room" in text
    for hidden in ("vllm serve", "TTFT", "throughput", "tokens/s"):
        assert hidden not in text


def json_of(call, *words):
    """The object of a call, whatever its exit code, which comes with it."""
    code, text, _ = call(*words, "--json")
    return code, json.loads(text)


@pytest.mark.parametrize(
    "words",
    [
        "--model llama-3.1-405b --cluster dgx-h100 --chips 4",
        "--model llama-3.3-70b --cluster dgx-a100 --chips 2 --tp 1",
        "--model llama-3.3-70b --chip rtx4090-24gb --chips 1 --engine sglang",
        "--model llama-3.1-8b --chip l40s-48gb --chips 1 --input-len 100k --max-batch 1000000 --max-tokens 16k",
        "--model deepseek-v3 --cluster dgx-h100 --chips 8 --engine tensorrt-llm",
        "--model llama-3.3-70b --cluster dgx-h100 --chips 4 --workers 1x2:1x2,tp=1,pp=2 --quantization bf16 --input-len 30k",
    ],
)
def test_what_would_fit_does(words, call):
    words = ["serve", *words.split()]
    words += [] if "--input-len" in words else ["--input-len", "1k"]
    code, service = json_of(call, *words, "--output-len", "1k")
    assert code == 2
    assert not service["fits"]
    assert service["verdict"].startswith("does not fit")
    assert len(service["remedies"]) <= 3
    assert service["remedies"] or "--workers" in words
    for remedy in service["remedies"]:
        flags = remedy["text"].split()
        kept = [word for at, word in enumerate(words) if word not in flags[::2] and (at == 0 or words[at - 1] not in flags[::2])]
        code, again = json_of(call, *kept, "--output-len", "1k", *flags)
        assert (code, again["fits"]) == (0, True), remedy["text"]


def test_a_search_in_which_nothing_fits_names_what_would(call):
    words = ["serve", "--search", "--model", "llama-3.3-70b", "--cluster", "dgx-h100", "--input-len", "1k", "--output-len", "1k"]
    code, _, error = call(*words, "--chips", 1, "--allow", "bf16", "--concurrency", 4)
    assert code == 2
    assert "would fit: --allow" in error
    assert len(error) < 200
    assert call(*words, "--chips", 1, "--allow", "w4a16", "--concurrency", 4)[0] == 0
    assert call(*words, "--chips", 2, "--allow", "bf16", "--concurrency", 4)[0] == 0


def test_the_verdict_comes_first(call):
    _, text, _ = call(*LLAMA, "--ttft", "1ms", "--latency", "50s")
    verdict = joined(text.partition("\njob ")[0])
    assert verdict.startswith("fits; misses ttft 1 ms (")
    assert "meets request latency 50 s" in verdict
    _, text, _ = call("serve", *JOB, "--tp", "4", "--rate", "1000")
    assert text.startswith("fits; cannot keep up")


@pytest.mark.parametrize("words", ["--objective cost", "--top 3", "--seed 5", "--limit-headroom 0"])
def test_flags_without_what_they_are_of_are_refused(call, words):
    code, _, error = call(*LLAMA, *words.split())
    assert code == 2
    assert "goes with --s" in error


def test_a_rate_without_tp_is_answered_where_it_can_be(call, call_json):
    asked = ["serve", "--model", "llama-3.3-70b", "--cluster", "dgx-h100", "--chips", "8", "--input-len", "1k", "--output-len", "1k"]
    tp_2, default, many = (call_json(*asked, *more.split()) for more in ("--rate 2 --tp 2", "--rate 2", "--rate 2000"))
    assert tp_2["is_saturated"]
    assert (default["plan"]["tp"], default["is_saturated"], default["requests_per_second"]) == (4, False, pytest.approx(2))
    assert default["ttft"]["mean"] < default["ttft"]["p99"] < 2 * default["ttft"]["mean"]
    assert many["is_saturated"]
    assert many["requests_per_second"] > tp_2["requests_per_second"]
    _, text, _ = call(*asked, "--rate", "2000")
    assert "a queue that only grows" in text
    assert "inf " not in text


def test_every_operator_has_its_bottleneck(call_json, tmp_path):
    figure = tmp_path / "roof.png"
    service = call_json(*LLAMA, "--tp", 4, "--operators", "--plot", figure)
    rows = service["operators"]
    decode = {row["name"]: row for row in rows if row["phase"] == "decode"}
    qkv = decode["q_proj + k_proj + v_proj"]
    assert service["running"] == pytest.approx(32, rel=0.02)
    assert qkv["flops"] == pytest.approx(80 * 2 * service["running"] * 8192 * (8192 + 2 * 1024) / 4)
    assert qkv["bound"] == "memory"
    weights = 2 * 80 * 8192 * 10240 / 4
    assert weights < qkv["bytes"] < 1.1 * weights
    prefill = {row["name"]: row for row in rows if row["phase"] == "prefill"}
    assert prefill["gate_proj + up_proj"]["bound"] == "compute"
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--quantization nvfp4 --engine tensorrt-llm", "does not run it on h100-sxm-80gb; use one of bf16, fp16, fp8"),
        (f"--engine {'x' * 300}", "is neither an engine's name nor a file; see `perfmodel engines`"),
        ("--tp 3", "must divide the 64 attention heads"),
        ("--ep 2 --tp 2", "has no experts"),
        ("--engine nobody", "is not known"),
        ("--tp 16", "a replica takes 16"),
        ("--rate 2", "cannot be given with a concurrency"),
        ("--draft-tokens 2", "no module for further tokens"),
        ("--draft-tokens 0", "must be a whole number of at least 1"),
        ("--acceptance .5", "is of drafts, of which there are none"),
        ("--plot x.png", "goes with --operators"),
        ("--limit-headroom 5%", "goes with --search"),
        ("--search --tpot 1ms", "meets them; the nearest, tp 8"),
        ("--search --limit-headroom 2", "write 0.1 or"),
    ],
)
def test_bad_input_is_one_sentence(more, words, call):
    code, out, error = call(*LLAMA, *more.split())
    assert (code, out) == (2, "")
    assert words in error
    assert len(error.strip().splitlines()) == 1


def test_a_context_beyond_the_models(call):
    code, _, error = call(*[word if word != "1k" else "100k" for word in LLAMA])
    assert code == 2
    assert "share the 131072 positions of llama-3.3-70b; use at most" in error


def test_percentiles_are_simulated(call_json, call):
    service = call_json(*LLAMA, "--tp", 4, "--simulate", "--ttft", "5s", "--tpot", "30ms")
    plain, rated = call_json(*LLAMA, "--tp", 4), call_json("serve", *JOB, "--rate", 2, "--tp", 4)
    assert service["tpot"]["p50"] <= service["tpot"]["p90"] <= service["tpot"]["p99"]
    assert service["tpot"]["mean"] == pytest.approx(plain["tpot"]["mean"], rel=0.05)
    assert all(plain[name] == service[name] for name in ("ttft", "tpot", "request_latency", "intervals"))
    assert plain["goodput"] is None
    assert rated["tpot"]["p50"] <= rated["tpot"]["p90"] <= rated["tpot"]["p99"]
    assert 0 < service["goodput"] <= service["requests_per_second"] * 1.001
    assert call_json(*LLAMA, "--tp", 4, "--simulate") == call_json(*LLAMA, "--tp", 4, "--simulate")
    code, _, error = call("serve", *JOB, "--tp", "4", "--simulate")
    assert code == 2
    assert "needs clients or arrivals" in error


def test_percentiles_of_two_pools_are_simulated(call_json):
    words = [*LLAMA, "--workers", "1x4:1x4"]
    plain, simulated = call_json(*words), call_json(*words, "--simulate", "--ttft", "3s", "--latency", "60s")
    assert simulated["request_latency"]["p50"] <= simulated["request_latency"]["p90"] <= simulated["request_latency"]["p99"]
    for name, allowed in (("tpot", 0.03), ("request_latency", 0.05)):
        assert simulated[name]["mean"] == pytest.approx(plain[name]["mean"], rel=allowed)
    assert simulated["requests_per_second"] == pytest.approx(plain["requests_per_second"], rel=0.05)
    assert 0 < simulated["goodput"] <= simulated["requests_per_second"] * 1.001


def test_ranks_that_share_the_tokens_of_a_cache(call_json, call):
    words = ["serve", "--model", "deepseek-v3", "--cluster", "hgx-h200", "--chips", 16, "--input-len", "16k", "--output-len", "1k"]
    words += ["--concurrency", 64, "--tp", 8]
    alone, shared = call_json(*words), call_json(*words, "--dcp", 8)
    assert shared["plan"]["dcp"] == 8
    assert shared["max_sequences"] > 7.9 * alone["max_sequences"]
    assert any("attention dp or dcp would cut it" in note for note in alone["notes"])
    assert not any("would cut it" in note for note in shared["notes"])
    assert "--decode-context-parallel-size 8" in shared["launch"][0]["command"]
    pools = call_json(*words, "--workers", "1x8:1x8", "--dcp", 8)["plan"]["pools"]
    assert (pools["prefill"]["dcp"], pools["decode"]["dcp"]) == (1, 8)
    for more, message in ((("--dcp", 3), "must divide tp=8"), (("--dcp", 8, "--engine", "sglang"), "has no decode context parallelism")):
        code, _, error = call(*words, *more)
        assert code == 2
        assert message in error


@pytest.mark.slow
def test_chips_that_share_prompts(call_json, call):
    words = ["serve", "--model", "deepseek-v3", "--cluster", "hgx-h200", "--input-len", "128k", "--output-len", "512", "--concurrency", 2]
    alone = call_json(*words, "--chips", 8, "--tp", 8, "--ep", 8)
    shared = call_json(*words, "--chips", 16, "--tp", 8, "--pcp", 2, "--ep", 16)
    assert (shared["plan"]["pcp"], shared["plan"]["num_chips"]) == (2, 16)
    assert 0.5 * alone["ttft"]["mean"] < shared["ttft"]["mean"] < 0.8 * alone["ttft"]["mean"]
    assert "--prefill-context-parallel-size 2" in shared["launch"][0]["command"]
    assert call_json(*words, "--chips", 32, "--pcp", 2, "--dcp", 8, "--ep", 8)["plan"]["tp"] == 4  # the tp that dcp spans
    pools = call_json(*words, "--chips", 24, "--workers", "1x16:1x8", "--pcp", 4)["plan"]["pools"]
    assert [(pools[of]["tp"], pools[of]["pcp"], pools[of]["ep"]) for of in ("prefill", "decode")] == [(4, 4, 16), (1, 1, 8)]
    for more, message in ((("--engine", "tensorrt-llm"), "no prefill context parallelism"), (("--pp", 2), "together with pp")):
        code, _, error = call(*words, "--chips", 32, "--tp", 4, "--pcp", 4, *more)
        assert code == 2
        assert message in error


def test_limits_of_one_plan_are_compared_with_it(call_json, call):
    words = [*LLAMA, "--tp", 4, "--ttft", "350ms", "--tpot", "10ms", "--latency", "1min"]
    service = call_json(*words)
    mean, tail = service["ttft"]["mean"], service["ttft"]["p99"]
    assert mean < 0.35 < tail
    assert service["limits"]["ttft"] == {"limit": 0.35, "kept_by_mean": True, "kept_by_p99": False}
    assert service["limits"]["tpot"]["kept_by_mean"] is False
    assert service["limits"]["request_latency"] == {"limit": 60.0, "kept_by_mean": True, "kept_by_p99": True}
    assert service["ttft"] == call_json(*LLAMA, "--tp", 4)["ttft"]
    code, text, _ = call(*words)
    assert code == 0
    for sentence in ("ttft 350 ms: its mean keeps it, its p99 is above", "tpot 10 ms: its mean is above", "keep the limits"):
        assert sentence in joined(text)
    code, _, error = call(*LLAMA, "--tp", 4, "--ttft", "1s", "--operators")
    assert code == 2
    assert "--ttft: --operators knows no limits" in error


def test_unset_options_fit_the_chip(call_json, call):
    words = ["--input-len", "1k", "--output-len", "1k", "--chips", "8", "--concurrency", "8"]
    code, older = json_of(call, "serve", "--model", "deepseek-v3", "--cluster", "dgx-a100", *words)
    assert code == 2
    assert older["plan"]["quantization"] == "fp8-weights"
    assert older["plan"]["tp"] == 8
    assert not older["fits"]
    assert call_json("serve", "--model", "deepseek-v3", "--cluster", "hgx-h200", *words)["plan"]["quantization"] == "fp8-block"


SEARCH = ["serve", "--search", *JOB, "--allow", "bf16,fp8", "--tpot", "30ms", "--ttft", "1s"]


@pytest.mark.slow
def test_a_search_under_limits(call_json, call, tmp_path):
    figure = tmp_path / "front.png"
    result = call_json(*SEARCH, "--top", 3, "--plot", figure)
    assert figure.stat().st_size > 10_000
    keys = {"num_evaluated", "num_feasible", "rejected", "search_time", "plans", "baselines", "pareto"}
    assert keys <= set(result)
    assert result["num_evaluated"] == result["num_feasible"] + sum(result["rejected"].values())
    best = result["plans"][0]
    assert best["tpot"]["mean"] <= 0.030
    assert best["ttft"]["mean"] <= 1.0
    assert [plan["tokens_per_second_per_chip"] for plan in result["plans"]] == sorted(
        (plan["tokens_per_second_per_chip"] for plan in result["plans"]), reverse=True
    )
    users = [point["tokens_per_second_per_user"] for point in result["pareto"]]
    chips = [point["tokens_per_second_per_chip"] for point in result["pareto"]]
    assert users == sorted(users, reverse=True)
    assert chips == sorted(chips)
    code, text, _ = call(*SEARCH)
    assert code == 0
    for words in ("The best plan: ", "Plans, best first", "Without a search", "Pareto front", "breaks tpot", "USD"):
        assert words in text


@pytest.mark.slow
def test_a_plan_without_a_search_that_does_not_fit_has_no_figures(call):
    words = "--search --model deepseek-v3 --cluster dgx-h100 --chips 16 --input-len 128k --output-len 1k --concurrency 4 --engine sglang"
    _, text, _ = call("serve", *words.split())
    (line,) = (line for line in text.splitlines() if line.startswith("tp over a node"))
    assert line.split("node", 1)[1].strip() == "tp 8 x 2: does not fit"


def test_workers_of_prompts_and_of_answers(call_json, call):
    service = call_json(*LLAMA, "--workers", "2x2:1x4")
    pools = service["plan"]["pools"]
    assert (pools["prefill_workers"], pools["prefill"]["tp"], pools["decode"]["tp"], service["plan"]["num_chips"]) == (2, 2, 4, 8)
    assert service["requests_per_second"] * service["request_latency"]["mean"] == pytest.approx(64, rel=1e-3)
    for words, message in (
        (("--workers", "2x4"), "3x4:1x8"),
        (("--workers", "2x4:1x4"), "12 chips of 8"),
        (("--workers", "1x4:1x4", "--replicas", "2"), "replicas"),
        (("--workers", "1x4:1x4", "--tp", "3"), "tp=3"),
        (("--workers", "1x4:1x4", "--operators"), "workers that do both"),
        (("--workers", "1x4:1x4", "--search"), "--disaggregated"),
        (("--simulate", "--seed", "-1"), "seed=-1: must be a whole number of at least 0"),
        (("--allow", "fp8"), "--allow: goes with --search"),
        (("--simulate", "--search"), "--simulate: does not go with --search"),
    ):
        code, _, error = call(*LLAMA, *words)
        assert code == 2
        assert message in error, error


@pytest.mark.slow
def test_a_search_for_workers_of_prompts_and_of_answers(call_json, call):
    words = [*SEARCH, "--disaggregated", "--top", 1]
    result = call_json(*words)
    best = result["disaggregated"][0]
    assert best["tpot"]["mean"] <= 0.030
    assert best["plan"]["pools"]["prefill_workers"] >= 1
    assert best["plan"]["num_chips"] + best["idle_chips"] == 8
    assert "tokens" in best["reason"]
    code, text, _ = call(*words)
    assert code == 0
    assert "Disaggregated: prefill and decode workers" in text
    assert call_json(*SEARCH, "--top", 1)["disaggregated"] == []


def test_limits_that_no_plan_meets(call):
    code, _, error = call(*[word if word != "30ms" else "1ms" for word in SEARCH])
    assert code == 2
    assert "tpot" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_steps_that_run_on_this_machine_are_shown_with_their_prediction(call_json, call, monkeypatch):
    pytest.importorskip("torch")
    from perfmodel.verbs import served_run
    from tests.cost.serving.test_executor import HERE
    from tests.execute.jobs import tiny

    original, kept = served_run.run_served, []

    def run_small(model, shapes, *, tp, progress):
        kept.append(kept[0] if kept else original(tiny("llama"), shapes, tp=tp, calibration=HERE, rounds=1, repeats=2))
        return kept[0]

    monkeypatch.setattr(served_run, "run_served", run_small)
    words = ["serve", "--run", "--input-len", "16", "--output-len", "8", "--concurrency", "3"]
    shown = call_json(*words)
    steps = [(step["sequences"], step["cached_tokens"], step["new_tokens"]) for step in shown["steps"]]
    assert steps == [(1, 20, 1), (3, 20, 1), (1, 0, 16), (1, 8, 8)]
    assert shown["logit_error"] < 1e-5
    assert all(sum(step["parts"].values()) == pytest.approx(step["predicted"]) for step in shown["steps"])
    code, text, error = call(*words)
    assert (code, error) == (0, "")
    for part in ("decode 3 over 21 tokens", "prefill 1 x 8 tokens after 8", "equal the uncached forward pass", "processor time"):
        assert part in text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--chips 8", "chips=8: is of a cluster's prediction"),
        ("--search", "leave out what predicts a service"),
        ("--model llama-3-8b --tp 3", "must divide num_attention_heads"),
        ("--model llama-4-scout", "has attention in chunks"),
    ],
)
def test_what_a_run_here_cannot_do_is_refused(call, more, words):
    pytest.importorskip("torch")
    code, _, error = call("serve", "--run", *more.split())
    assert code == 2
    assert words in error


@pytest.mark.slow
def test_the_fewest_chips_of_a_load(call_json, call):
    words = ["serve", "--search", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--input-len", "512", "--output-len", "256"]
    load = [*words, "--rate", "60", "--tpot", "20ms"]
    result = call_json(*load, "--top", 1)
    assert result["plans"][0]["tpot"]["mean"] <= 0.020
    assert call(*load, "--chips", result["chips"] // 2)[0] == 2
    code, _, error = call(*words)
    assert code == 2
    assert "--chips" in error


MOE_POOLS = ["serve", "--model", "deepseek-v3", "--cluster", "hgx-h200", "--chips", 16, "--input-len", "4k", "--output-len", "1k"]


@pytest.mark.slow
def test_a_disaggregated_search_ends_with_the_best_of_all_that_it_lists(call_json, call):
    words = [*MOE_POOLS, "--search", "--disaggregated", "--ttft", "2s", "--tpot", "50ms", "--top", 2]
    result = call_json(*words)
    listed = [*result["plans"], *result["disaggregated"]]
    assert result["best"]["tokens_per_second_per_chip"] == max(plan["tokens_per_second_per_chip"] for plan in listed)
    assert result["best"]["plan"]["pools"] is not None
    assert len(result["launch"]) == 2
    assert "fewer tokens than disaggregated" in result["plans"][0]["reason"]
    _, text, _ = call(*words)
    assert text.startswith("The best plan: prefill 1 x")
    assert text.count("kv-transfer-config") == 2


@pytest.mark.slow
def test_a_disaggregated_plan_that_a_search_found_can_be_given_again(call_json):
    best = call_json(*MOE_POOLS, "--search", "--disaggregated", "--ttft", "2s", "--tpot", "50ms", "--top", 1)["best"]
    assert best["plan"]["tp"] is None
    pools = best["plan"]["pools"]
    assert pools["prefill"]["pp"] != pools["decode"]["pp"]
    again = call_json(*MOE_POOLS, "--workers", best["plan"]["workers"], "--concurrency", best["plan"]["concurrency"])
    assert again["plan"] == best["plan"]
    assert again["ttft"] == best["ttft"]


def test_what_a_worker_cannot_be_is_refused(call):
    for workers, message in (
        ("1x8,tp=3:1x8", "tp=3: must divide the 8 chips"),
        ("1x8:1x8,tq=4", "tq is no degree of a worker; use tp, pp"),
        ("1x8,tp=2,tp=4:1x8", "tp is given twice"),
        ("1x8,dcp=2:1x8", "dcp is of decode workers"),
        ("1x8:1x8,pcp=2", "pcp is of prefill workers"),
        ("1x8,tp=2,pp=2,attention-dp=1:1x8", "is 4"),
        ("1x8,tp=0:1x8", "tp"),
    ):
        code, _, error = call(*MOE_POOLS, "--concurrency", 64, "--workers", workers)
        assert code == 2
        assert message in error, error


def test_fp8_on_a_chip_without_units_for_it_is_weight_only_where_the_engine_has_it(call_json, call):
    words = ["serve", "--model", "llama-3.1-8b", "--cluster", "dgx-a100", "--chips", 1, "--input-len", "1k", "--output-len", 256]
    narrow, wide = (call_json(*words, "--concurrency", 4, "--quantization", name) for name in ("fp8", "bf16"))
    assert narrow["plan"]["quantization"] == "fp8-weights"
    assert "--quantization fp8" in narrow["launch"][0]["command"]
    assert narrow["memory"]["weights"] < 0.6 * wide["memory"]["weights"]
    assert narrow["tpot"]["mean"] < 0.9 * wide["tpot"]["mean"]
    assert any("has no products in fp8; weights are widened" in note for note in narrow["notes"])
    best = call_json(*words, "--search", "--allow", "bf16,fp8,w4a8", "--top", 3)
    assert {plan["plan"]["quantization"] for plan in best["plans"]} == {"bf16", "fp8-weights"}
    code, _, error = call(*words, "--quantization", "fp8", "--engine", "tensorrt-llm")
    assert code == 2
    assert "use one of bf16, fp16, int8, int8-weights, w4a16, or another chip" in error


@pytest.mark.slow
def test_a_bound_that_does_not_bind_is_searched(call_json):
    words = ["serve", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--input-len", "1k", "--output-len", 256, "--concurrency", 4]
    for chips in (1, 8):
        bound = call_json(*words, "--chips", chips, "--max-batch", 4, "--search")["best"]
        free = call_json(*words, "--chips", chips, "--search")["best"]
        assert bound["plan"]["max_batch"] == 4
        assert bound["tokens_per_second_per_chip"] == pytest.approx(free["tokens_per_second_per_chip"], rel=1e-6)


def test_intervals_of_a_row_count_idle_chips_as_the_row_does(call_json):
    words = ["serve", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--input-len", "1k", "--output-len", 256, "--concurrency", 16]
    service = call_json(*words, "--chips", 8, "--search", "--tp", 4, "--pp", 1, "--replicas", 1)["best"]
    assert service["idle_chips"] == 4
    low, high = service["intervals"]["tokens_per_second"]
    assert low < service["tokens_per_second_per_chip"] < high


def test_an_engine_without_intervals_is_searched(call_json):
    words = ["serve", "--model", "llama-3-8b", "--cluster", "mi300x", "--chips", 8, "--input-len", "1k", "--output-len", 16]
    assert call_json(*words, "--concurrency", 64, "--engine", "generic", "--search", "--top", 1)["best"]["fits"]


def test_more_chips_than_a_service_can_have_are_refused_by_their_own_name(call):
    words = ["serve", "--model", "llama-3-8b", "--chip", "h100-sxm-80gb", "--input-len", "1k", "--output-len", 128]
    for more in ((), ("--search",)):
        code, _, error = call(*words, "--chips", 10**9, *more)
        assert code == 2
        assert "chips=1000000000: must be at most 1,048,576" in error


SEVERAL = ["serve", "--model", "llama-3.3-70b", "--input-len", "1k", "--output-len", "1k"]


@pytest.mark.slow
def test_several_clusters_and_loads_are_rows_of_one_table(call, call_json, tmp_path):
    words = [*SEVERAL, "--cluster", "dgx-h100,hgx-h200", "--chips", "1,8", "--concurrency", "16,64", "--tpot", "30ms"]
    code, text, _ = call(*words, "--csv", tmp_path / "services.csv")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 100
    assert text.count("does not fit") == 4
    rows = list(csv.DictReader((tmp_path / "services.csv").read_text().splitlines()))
    assert [(row["cluster"], row["chips"], row["concurrency"]) for row in rows[::2]] == [
        ("dgx-h100", "1", "16"), ("dgx-h100", "8", "16"), ("hgx-h200", "1", "16"), ("hgx-h200", "8", "16"),
    ]  # fmt: skip
    predictions = call_json(*words)["predictions"]
    for row, prediction in zip(rows, predictions, strict=True):
        assert float(row["tokens_per_second_per_chip"]) == prediction["tokens_per_second_per_chip"]
        assert row["fits"] == str(prediction["fits"]).lower()
    alone = call_json(*SEVERAL, "--cluster", "hgx-h200", "--chips", 8, "--concurrency", 64)
    assert predictions[-1]["ttft"] == alone["ttft"]
    served = perfmodel.serve_several(
        model="llama-3.3-70b", cluster=["dgx-h100", "hgx-h200"], chips=8, input_len=1024, output_len=1024, concurrency=[16, 64]
    )
    assert [answer.asked for answer in served][1] == {"cluster": "dgx-h100", "concurrency": 64}
    assert served[-1].prediction.ttft.mean == alone["ttft"]["mean"]


def test_what_cannot_be_among_several_is_named_and_the_others_are_shown(call):
    words = [*SEVERAL, "--cluster", "dgx-h100", "--chips", 8, "--rate", 1]
    code, text, _ = call(*words, "--tp", "3,4,8")
    assert code == 0
    assert "not predicted: tp=3: must divide the 64 attention heads" in text
    for more, message in (
        (("--tp", "3,5"), "tp=3: must divide"),
        (("--tp", "4,8", "--operators"), "--operators: takes one cluster, one load"),
        (("--tp", "4", "--concurrency", "1,024"), "write 1024 for one number"),
        (("--chips", "1,2", "--csv", "table.txt"), "must end in .csv"),
    ):
        code, _, error = call(*[word for word in words if not (more[0] == "--chips" and word in ("--chips", 8))], *more)
        assert code == 2
        assert message in error, error
    assert call(*SEVERAL, "--cluster", "dgx-h100", "--chips", "1,2", "--tp", "1")[0] == 2  # none fits


def test_cost_needs_no_search_and_counts_idle_chips(call_json, call):
    words = [*SEVERAL, "--cluster", "dgx-h100", "--chips", 8, "--concurrency", 64]
    listed, given = call_json(*words), call_json(*words, "--price", "1.5")
    assert given["price_per_hour"] == 1.5
    assert given["cost_per_million_tokens"] == pytest.approx(1.5 / 3600 / given["tokens_per_second_per_chip"] * 1e6)
    assert listed["cost_per_million_tokens"] / listed["price_per_hour"] == pytest.approx(given["cost_per_million_tokens"] / 1.5)
    idle = call_json(*words, "--price", "1.5", "--tp", 4, "--replicas", 1)
    assert idle["cost_per_million_tokens"] == pytest.approx(2 * 1.5 / 3600 / idle["tokens_per_second_per_chip"] * 1e6)
    assert "1.50 USD an hour for a chip" in call(*words, "--price", "1.5")[1]
    search = call_json(*words, "--price", "1.5", "--search", "--objective", "cost", "--top", 1)
    assert search["price_per_hour"] == 1.5
    code, _, error = call(*words, "--price", "none")
    assert code == 2
    assert "price=none: must be a positive number of USD" in error


def test_the_plans_of_a_search_are_rows_too(call, tmp_path):
    words = [*SEVERAL, "--cluster", "dgx-h100", "--chips", 8, "--concurrency", 16, "--search", "--top", 3]
    code, text, _ = call(*words, "--csv", tmp_path / "plans.csv")
    assert code == 0
    assert "table: " in text
    rows = list(csv.DictReader((tmp_path / "plans.csv").read_text().splitlines()))
    assert [row["place"] for row in rows] == ["1", "2", "3"]
    assert all(row["kind"] == "aggregated" and row["meets"] == "true" for row in rows)
    code, text, _ = call(*words, "--csv", "-")
    assert text.startswith("place,kind,model")


@pytest.mark.slow
def test_how_many_plans_are_shown_changes_nothing_else(call_json):
    words = ["serve", "--search", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--chips", 8, "--input-len", "1k", "--output-len", 256]
    few, many = (call_json(*words, "--tpot", "20ms", "--top", top) for top in (1, 8))
    assert few["num_evaluated"] == many["num_evaluated"]
    assert few["plans"] == many["plans"][:1]


@pytest.mark.slow
def test_searches_on_several_clusters_are_rows_of_their_best_plans(call, call_json, tmp_path):
    words = [*SEVERAL, "--search", "--cluster", "dgx-h100,hgx-h200", "--ttft", "1s", "--tpot", "30ms"]
    code, text, _ = call(*words, "--chips", "1,8", "--csv", tmp_path / "best.csv")
    assert code == 0
    assert max(len(line) for line in text.splitlines() if not line.startswith("no plan:")) <= 100
    assert text.count("no plan\n") == 2
    assert "no plan: chips=1: no plan of llama-3.3-70b fits" in text
    searches = call_json(*words, "--chips", 8)["searches"]
    alone = call_json(*words[:words.index("--cluster")], "--cluster", "hgx-h200", *words[words.index("--ttft"):], "--chips", 8)  # fmt: skip
    assert searches[1]["best"] == alone["best"]
    rows = list(csv.DictReader((tmp_path / "best.csv").read_text().splitlines()))
    assert float(rows[1]["tokens_per_second_per_chip"]) == alone["best"]["tokens_per_second_per_chip"]
    _, text, _ = call(*words, "--rate", "2,8")  # the fewest chips of each
    assert [line.split()[2] for line in text.splitlines() if "meets" in line and "h200" in line] == ["4", "16"]


@pytest.mark.parametrize(
    "words", ["--chips 1 --ttft 1s --tpot 30ms --allow bf16,fp8", "--chips 4 --rate 20", "--chips 2 --allow bf16 --tpot 26ms"]
)
@pytest.mark.slow
def test_a_search_that_finds_nothing_names_changes_under_which_it_finds_a_plan(words, call):
    words = [*SEVERAL, "--search", "--cluster", "dgx-h100", *words.split()]
    code, _, error = call(*words)
    assert code == 2
    changes = error.strip().split("would meet them: ")[1].split(" or ")
    assert 1 <= len(changes) <= 3
    for change in changes:
        name, value = change.split()
        kept = [word for at, word in enumerate(words) if word != name and words[at - 1] != name]
        assert call(*kept, name, value, "--top", 1)[0] == 0, change


@pytest.mark.slow
def test_the_front_marks_the_best_of_all_plans_and_no_label_covers_another(tmp_path):
    search = perfmodel.find_serving(
        model="llama-3.3-70b", cluster="dgx-h100", chips=16, input_len=4096, output_len=1024, ttft="2s", tpot="50ms", disaggregated=True
    )
    figure = front_figure(search, "front")
    (axes,) = figure.axes
    star = axes.collections[-1 - sum(bool(baseline.plans) for baseline in search.baselines)].get_offsets()[0]
    assert star[1] == pytest.approx(search.best.tokens_per_second_per_chip)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts if text.get_rotation() == 0]
    assert boxes
    assert not any(a.overlaps(b) for at, a in enumerate(boxes) for b in boxes[:at])


def test_energy_and_carbon_of_a_million_tokens_follow_the_constants(call, call_json):
    load = ("--model", "llama-3-8b", "--cluster", "dgx-h100", "--chips", "1", "--input-len", "512", "--output-len", "64")
    plain = call_json("serve", *load)
    watts = 700 * 1.82 * 0.79 * 1.15
    assert plain["energy_per_million_tokens"] == pytest.approx(1e6 * watts / plain["tokens_per_second_per_chip"])
    assert plain["carbon_per_million_tokens"] == pytest.approx(plain["energy_per_million_tokens"] / 3.6e6 * 0.481)
    clean = call_json("serve", *load, "--assume", "location=norway", "--assume", "pue=2.3")
    assert clean["energy_per_million_tokens"] == pytest.approx(2 * plain["energy_per_million_tokens"])
    assert clean["carbon_per_million_tokens"] == pytest.approx(2 * plain["carbon_per_million_tokens"] * 30 / 481)
    assert call_json("serve", *load, "--assume", "price=9")["price_per_hour"] == 9
    best = call_json("serve", *load, "--search", "--top", "1")["best"]
    assert best["energy_per_million_tokens"] == pytest.approx(1e6 * watts / best["tokens_per_second_per_chip"])
    code, out, _ = call("serve", *load)
    assert code == 0
    assert "kg CO2e a million output tokens" in out
    code, _, error = call("serve", *load, "--assume", "pew=1")
    assert code == 2
    assert "assume=pew: is no assumption; did you mean 'pue'" in error


def test_a_search_names_batched_tokens_where_its_plans_differ_in_them(call):
    load = "--model llama-3.1-8b --cluster dgx-h100 --chips 1 --input-len 1k --output-len 256 --concurrency 64 --engine vllm"
    out = call("serve", "--search", *load.split())[1]
    assert "tp 1, 1,024 batched" in out
    assert "batched: most tokens of a step" in joined(out)


def test_the_job_line_has_drafts_and_the_cached_share_of_prompts(call):
    more = "--input-len 1k --output-len 500 --concurrency 8 --draft-model llama-3.2-1b --draft-tokens 4 --prefix-hit .5"
    out = joined(call("serve", "--model", "llama-3.3-70b", "--cluster", "dgx-h100", "--chips", "4", *more.split())[1])
    assert "500 out, 50.0 % of a prompt cached, 4 tokens drafted a step by llama-3.2-1b, 0.7 accepted, 8 in flight" in out


def test_a_printed_file_of_an_engine_can_be_copied(call):
    load = "--model llama-3.1-8b --cluster dgx-h100 --chips 1 --input-len 1k --output-len 500 --concurrency 8 --engine tensorrt-llm"
    out = call("serve", *load.split())[1]
    assert "\nserve.yaml:\nenable_attention_dp: false\nenable_chunked_prefill: true\nkv_cache_config:\n  dtype: auto\n" in out


def test_a_rate_has_no_column_of_requests_in_flight(call):
    load = "--search --model llama-3.1-8b --cluster dgx-h100 --chips 1 --input-len 1k --output-len 500 --top 2"
    plans = call("serve", *load.split(), "--rate", "2")[1].partition("Pareto front")[0]
    assert "weights  tok/s/chip" in plans
    assert "in flight" not in plans


def test_raising_limits_as_the_refusal_names_them_is_enough(call):
    load = "serve --search --model llama-3.1-8b --cluster dgx-h100 --chips 1 --input-len 127k --output-len 1k"
    error = joined(call(*load.split(), "--ttft", "1s")[2])
    time = re.search(r"raise ttft to ([\d.]+) s", error)
    assert time is not None
    assert call(*load.split(), "--ttft", f"{time[1]}s")[0] == 0


@pytest.mark.parametrize("name", ["awq", "gptq", "int4"])
def test_names_of_engines_are_formats(call_json, name):
    load = "serve --model llama-3.1-8b --cluster dgx-h100 --chips 1 --input-len 1k --output-len 100 --concurrency 8"
    assert call_json(*load.split(), "--quantization", name)["plan"]["quantization"] == "w4a16"


def test_time_outside_the_steps_is_named_where_it_is_most_of_ttft(call_json):
    load = "serve --model llama-3.1-8b --cluster dgx-h100 --chips 1 --input-len 1k --output-len 100 --engine sglang"
    assert any(
        "of TTFT is network, tokenization and API server" in note for note in call_json(*load.split(), "--concurrency", "1")["notes"]
    )
    assert not any("of TTFT is" in note for note in call_json(*load.split(), "--concurrency", "400")["notes"])
