"""`perfmodel serve` from the command line."""

import pytest

import perfmodel

JOB = ["--model", "llama-3.3-70b", "--cluster", "dgx-h100", "--chips", "8", "--input-len", "1k", "--output-len", "1k"]
LLAMA = ["serve", *JOB, "--concurrency", "64"]


def test_one_object(call_json):
    found = call_json(*LLAMA)
    asked = {"ttft", "tpot", "request_latency", "tokens_per_second_per_chip", "max_sequences", "memory", "parts", "plan", "rests_on"}
    assert asked <= set(found)
    assert found["tpot"]["mean"] * 1023 + found["ttft"]["mean"] == pytest.approx(found["request_latency"]["mean"])
    assert sum(found["parts"].values()) == pytest.approx(found["decode_step"])
    served = perfmodel.serve(model="llama-3.3-70b", cluster="dgx-h100", chips=8, input_len=1024, output_len=1024, concurrency=64)
    assert served.tpot.mean == found["tpot"]["mean"]


def test_what_people_read(call):
    code, text, error = call(*LLAMA)
    assert (code, error) == (0, "")
    for words in ("first token", "each token", "sequences of mean length fit", "Where a decode step", "Memory of a chip", "nobody said"):
        assert words in text


def test_what_does_not_fit_is_not_started(call):
    asked = "--model llama-3.1-405b --cluster dgx-h100 --chips 4 --input-len 1k --output-len 1k"
    code, text, _ = call("serve", *asked.split())
    assert code == 0
    assert "does not fit: weights take" in text
    assert "tp: nobody said, and 4 leaves most room" in text
    assert "vllm serve" not in text


def test_a_rate_without_tp_is_answered_where_it_can_be(call, call_json):
    asked = ["serve", "--model", "llama-3.3-70b", "--cluster", "dgx-h100", "--chips", "8", "--input-len", "1k", "--output-len", "1k"]
    tp_2, own, many = (call_json(*asked, *more.split()) for more in ("--rate 2 --tp 2", "--rate 2", "--rate 2000"))
    assert tp_2["is_saturated"]
    assert (own["plan"]["tp"], own["is_saturated"], own["requests_per_second"]) == (4, False, pytest.approx(2))
    assert own["ttft"]["mean"] < own["ttft"]["p99"] < 2 * own["ttft"]["mean"]
    assert many["is_saturated"]
    assert many["requests_per_second"] > tp_2["requests_per_second"]
    _, text, _ = call(*asked, "--rate", "2000")
    assert "a queue that only grows" in text
    assert "inf " not in text


def test_every_operator_with_what_bounds_it(call_json, tmp_path):
    figure = tmp_path / "roof.png"
    rows = call_json(*LLAMA, "--tp", 4, "--operators", "--plot", figure)["operators"]
    decode = {row["name"]: row for row in rows if row["phase"] == "decode"}
    qkv = decode["q_proj + k_proj + v_proj"]
    assert qkv["flops"] == 80 * 2 * 32 * 8192 * (8192 + 2 * 1024) / 4
    assert qkv["bound"] == "memory"
    weights = 2 * 80 * 8192 * 10240 / 4
    assert weights < qkv["bytes"] < 1.1 * weights
    prefill = {row["name"]: row for row in rows if row["phase"] == "prefill"}
    assert prefill["gate_proj + up_proj"]["bound"] == "compute"
    assert figure.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--quantization nvfp4", "no units for it"),
        ("--tp 3", "must divide the 64 attention heads"),
        ("--ep 2 --tp 2", "has no experts"),
        ("--engine nobody", "is not known"),
        ("--tp 16", "a replica takes 16"),
        ("--rate 2", "cannot be given beside a concurrency"),
        ("--draft-tokens 2", "no module for further tokens"),
        ("--draft-tokens 0", "must be a whole number of at least 1"),
        ("--acceptance .5", "is of drafts, of which there are none"),
        ("--plot x.png", "goes with --operators"),
        ("--limit-headroom 5%", "goes with --search"),
        ("--search --tpot 1ms", "with 1.5 % of each to spare"),
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
    assert "is longer than the 131072 of llama-3.3-70b" in error


def test_percentiles_are_simulated(call_json, call):
    found = call_json(*LLAMA, "--tp", 4, "--simulate", "--ttft", "5s", "--tpot", "30ms")
    plain = call_json(*LLAMA, "--tp", 4)
    assert found["tpot"]["p50"] <= found["tpot"]["p90"] <= found["tpot"]["p99"]
    assert found["tpot"]["mean"] == pytest.approx(plain["tpot"]["mean"], rel=0.05)
    assert plain["tpot"]["p50"] is None
    assert 0 < found["goodput"] <= found["requests_per_second"] * 1.001
    assert call_json(*LLAMA, "--tp", 4, "--simulate") == call_json(*LLAMA, "--tp", 4, "--simulate")
    code, _, error = call("serve", *JOB, "--tp", "4", "--simulate")
    assert code == 2
    assert "needs clients or arrivals" in error


def test_percentiles_of_two_pools_are_simulated(call_json):
    words = [*LLAMA, "--workers", "1x4:1x4"]
    plain, found = call_json(*words), call_json(*words, "--simulate", "--ttft", "3s", "--latency", "60s")
    assert found["request_latency"]["p50"] <= found["request_latency"]["p90"] <= found["request_latency"]["p99"]
    for name, allowed in (("tpot", 0.03), ("request_latency", 0.05)):
        assert found[name]["mean"] == pytest.approx(plain[name]["mean"], rel=allowed)
    assert found["requests_per_second"] == pytest.approx(plain["requests_per_second"], rel=0.05)
    assert 0 < found["goodput"] <= found["requests_per_second"] * 1.001


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
    for more, said in ((("--dcp", 3), "must divide tp=8"), (("--dcp", 8, "--engine", "sglang"), "has no decode context parallelism")):
        code, _, error = call(*words, *more)
        assert code == 2
        assert said in error


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
    for more, said in ((("--engine", "tensorrt-llm"), "no prefill context parallelism"), (("--pp", 2), "beside pp")):
        code, _, error = call(*words, "--chips", 32, "--tp", 4, "--pcp", 4, *more)
        assert code == 2
        assert said in error


def test_limits_of_one_plan_are_compared_with_it(call_json, call):
    words = [*LLAMA, "--tp", 4, "--ttft", "350ms", "--tpot", "10ms", "--latency", "1min"]
    found = call_json(*words)
    mean, tail = found["ttft"]["mean"], found["ttft"]["p99"]
    assert mean < 0.35 < tail
    assert found["limits"]["ttft"] == {"limit": 0.35, "kept_by_mean": True, "kept_by_p99": False}
    assert found["limits"]["tpot"]["kept_by_mean"] is False
    assert found["limits"]["request_latency"] == {"limit": 60.0, "kept_by_mean": True, "kept_by_p99": None}
    assert found["ttft"] == call_json(*LLAMA, "--tp", 4)["ttft"]
    code, text, _ = call(*words)
    assert code == 0
    for said in ("ttft 350 ms: its mean keeps it, its p99 is above", "tpot 10 ms: its mean is above", "--simulate counts"):
        assert said in text
    code, _, error = call(*LLAMA, "--tp", 4, "--ttft", "1s", "--operators")
    assert code == 2
    assert "--ttft: --operators knows no limits" in error


def test_what_nobody_said_fits_the_chip(call_json):
    words = ["--input-len", "1k", "--output-len", "1k", "--chips", "8", "--concurrency", "8"]
    older = call_json("serve", "--model", "deepseek-v3", "--cluster", "dgx-a100", *words)
    assert older["plan"]["quantization"] == "int8-weights"
    assert older["plan"]["tp"] == 8
    assert not older["fits"]
    assert call_json("serve", "--model", "deepseek-v3", "--cluster", "hgx-h200", *words)["plan"]["quantization"] == "fp8-block"


SEARCH = ["serve", "--search", *JOB, "--allow", "bf16,fp8", "--tpot", "30ms", "--ttft", "1s"]


def test_a_search_under_limits(call_json, call, tmp_path):
    figure = tmp_path / "front.png"
    found = call_json(*SEARCH, "--top", 3, "--plot", figure)
    assert figure.stat().st_size > 10_000
    keys = {"num_evaluated", "num_feasible", "rejected", "search_time", "plans", "baselines", "pareto"}
    assert keys <= set(found)
    assert found["num_evaluated"] == found["num_feasible"] + sum(found["rejected"].values())
    best = found["plans"][0]
    assert best["tpot"]["mean"] <= 0.030
    assert best["ttft"]["mean"] <= 1.0
    assert [plan["tokens_per_second_per_chip"] for plan in found["plans"]] == sorted(
        (plan["tokens_per_second_per_chip"] for plan in found["plans"]), reverse=True
    )
    users = [point["tokens_per_second_per_user"] for point in found["pareto"]]
    chips = [point["tokens_per_second_per_chip"] for point in found["pareto"]]
    assert users == sorted(users, reverse=True)
    assert chips == sorted(chips)
    code, text, _ = call(*SEARCH)
    assert code == 0
    for words in ("Plans, best first", "What one would take without a search", "The front:", "breaks tpot", "USD"):
        assert words in text


def test_workers_of_prompts_and_of_answers(call_json, call):
    found = call_json(*LLAMA, "--workers", "2x2:1x4")
    pools = found["plan"]["pools"]
    assert (pools["prefill_workers"], pools["prefill"]["tp"], pools["decode"]["tp"], found["plan"]["num_chips"]) == (2, 2, 4, 8)
    assert found["requests_per_second"] * found["request_latency"]["mean"] == pytest.approx(64, rel=1e-3)
    for words, said in (
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
        assert said in error, error


@pytest.mark.slow
def test_a_search_for_workers_of_prompts_and_of_answers(call_json, call):
    words = [*SEARCH, "--disaggregated", "--top", 1]
    found = call_json(*words)
    best = found["disaggregated"][0]
    assert best["tpot"]["mean"] <= 0.030
    assert best["plan"]["pools"]["prefill_workers"] >= 1
    assert best["plan"]["num_chips"] + best["idle_chips"] == 8
    assert "tokens" in best["reason"]
    code, text, _ = call(*words)
    assert code == 0
    assert "Prompts and answers on workers of their own" in text
    assert call_json(*SEARCH, "--top", 1)["disaggregated"] == []


def test_limits_that_no_plan_meets(call):
    code, _, error = call(*[word if word != "30ms" else "1ms" for word in SEARCH])
    assert code == 2
    assert "tpot" in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_steps_that_run_here_beside_their_prediction(call_json, call, monkeypatch):
    pytest.importorskip("torch")
    from perfmodel.verbs import served_run
    from tests.cost.serving.test_executor import HERE
    from tests.execute.jobs import tiny

    original, found = served_run.run_served, []

    def run_small(model, shapes, *, tp, progress):
        found.append(found[0] if found else original(tiny("llama"), shapes, tp=tp, calibration=HERE, rounds=1, repeats=2))
        return found[0]

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


def test_the_fewest_chips_of_a_load(call_json, call):
    words = ["serve", "--search", "--model", "llama-3-8b", "--cluster", "dgx-h100", "--input-len", "512", "--output-len", "256"]
    load = [*words, "--rate", "60", "--tpot", "20ms"]
    found = call_json(*load, "--top", 1)
    assert found["plans"][0]["tpot"]["mean"] <= 0.020
    assert call(*load, "--chips", found["chips"] // 2)[0] == 2
    code, _, error = call(*words)
    assert code == 2
    assert "--chips" in error
