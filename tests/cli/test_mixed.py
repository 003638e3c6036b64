"""Clusters of several kinds of chips from the command line."""

import json
from pathlib import Path

import pytest

MIX = "8@dgx-h100+8@dgx-a100"
JOB = ["--model", "llama-3-8b", "--global-batch", "32", "--seq-len", "4k", "--cluster", MIX, "--profile", "megatron"]
SERVED = ["--model", "llama-3-8b", "--input-len", "1000", "--output-len", "200", "--rate", "2"]

POOLS = """
name: ours
pools:
  - {chips: 8, cluster: dgx-h100}
  - {chips: 8, cluster: dgx-a100}
"""


@pytest.mark.slow
def test_a_searched_plan_is_predicted_again_from_its_file(call, call_json, tmp_path):
    best = call_json("search", *JOB, "--save", tmp_path / "best.yaml")["plans"][0]
    again = call_json("predict", tmp_path / "best.yaml")
    assert again["step_time"] == best["step_time"]
    assert again["plan"]["cluster"] == MIX
    code, out, _ = call("predict", tmp_path / "best.yaml", "--verbose")
    assert code == 0
    assert "layers of the stages" in out or "replicas:" in out


def test_a_plan_of_a_mix_is_explained(call, tmp_path):
    call("predict", *JOB, "--pp", "2", "--tp", "2", "--save", tmp_path / "plan.yaml")
    code, out, _ = call("explain", tmp_path / "plan.yaml")
    assert code == 0
    assert MIX in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["limits", "--model", "llama-3-8b", "--seq-len", "4k", "--cluster", MIX, "--chips", "8"], "has 16; leave it out"),
        (
            ["explore", *JOB, "--vary", "network.scale_out.bandwidth=25GB/s,50GB/s"],
            "name one: network.h100.scale_out.bandwidth or network.a100.scale_out.bandwidth",
        ),
        (["explore", *JOB, "--vary", "chip.memory.bandwidth=x2"], "name one: chip.h100.memory.bandwidth or chip.a100.memory.bandwidth"),
        (["explore", *JOB, "--vary", "chip.h200.memory.bandwidth=x2"], "did you mean 'chip.h100.memory.bandwidth'"),
        (["explore", *JOB, "--vary", "chip=a100-sxm-80gb", "--vary", "chip.h100.memory.bandwidth=x2"], "vary one of the two"),
        (["explore", *JOB[:6], "--chips", "16", "--from", "dgx-h100", "--to", MIX], "search both clusters"),
        (["serve", *SERVED, "--cluster", "pools.yaml"], "give prefill and decode workers"),
        (["predict", *JOB, "--chips", "8"], "has 16; leave it out"),
        (["predict", *JOB, "--tp", "16"], "chips of two kinds"),
        (["serve", *SERVED, "--cluster", MIX], "--workers 3x4@h20:1x8@h200"),
        (["serve", *SERVED, "--workers", "1x4@h20:1x8"], "names the chips of one kind of worker only"),
        (["serve", *SERVED, "--workers", "1x4@h20:1x8@h200", "--cluster", "dgx-h100"], "leave out one of the two"),
        (["serve", *SERVED, "--workers", "2x8:1x8", "--cluster", MIX], "prefill workers take more than the 8 chips"),
    ],
)
def test_what_cannot_be_is_one_sentence(call, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pools.yaml").write_text(POOLS, encoding="utf-8")
    code, _, err = call(*arguments)
    assert code == 2
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_workers_on_their_own_chips_are_those_of_one_cluster_where_the_chips_are_the_same(call_json):
    """A handover between pools takes the links between nodes, as two workers on two nodes do."""
    one = call_json("serve", *SERVED, "--workers", "1x8:1x8", "--cluster", "dgx-h100", "--chips", "16")
    two = call_json("serve", *SERVED, "--workers", "1x8@dgx-h100:1x8@dgx-h100")
    assert two["tpot"] == one["tpot"]
    assert two["ttft"]["mean"] == pytest.approx(one["ttft"]["mean"], rel=1e-9)


@pytest.mark.slow
def test_prompts_on_slower_chips_take_longer_and_answers_do_not(call_json):
    fast = call_json("serve", *SERVED, "--workers", "1x8@dgx-h100:1x8@dgx-h100")
    slow = call_json("serve", *SERVED, "--workers", "1x8@dgx-a100:1x8@dgx-h100")
    assert slow["ttft"]["mean"] > 1.2 * fast["ttft"]["mean"]
    assert slow["tpot"]["mean"] == pytest.approx(fast["tpot"]["mean"], rel=0.02)


@pytest.mark.slow
def test_a_file_of_pools_is_predicted_as_their_text(call, call_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pools.yaml").write_text(POOLS, encoding="utf-8")
    knobs = ["--pp", "2", "--tp", "2"]
    text = call_json("predict", *JOB, *knobs)
    in_file = [*JOB[: JOB.index(MIX)], "pools.yaml", *JOB[JOB.index(MIX) + 1 :]]
    again = call_json("predict", *in_file, *knobs, "--save", "plan.yaml")
    assert again["step_time"] == text["step_time"]
    assert call_json("predict", "plan.yaml")["step_time"] == text["step_time"]
    served = ["serve", *SERVED, "--workers", "1x8:1x8", "--cluster"]
    assert call_json(*served, "pools.yaml")["tpot"] == call_json(*served, MIX)["tpot"]
    code, out, _ = call("clusters", "pools.yaml")
    assert code == 0
    assert "h100-sxm-80gb" in out
    assert "a100-sxm-80gb" in out


@pytest.mark.slow
def test_a_plan_of_a_mix_has_a_trace_a_page_and_an_export(call, call_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call("search", *JOB, "--save", "plan.yaml")
    for arguments in (["trace", "plan.yaml", "--out", "trace.json"], ["export", "plan.yaml", "--to", "megatron"]):
        code, _, err = call(*arguments)
        assert (code, err) == (0, "")
    code, _, _ = call("report", "plan.yaml", "--out", "page.html")
    assert code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "8 of dgx-h100" in page
    assert "8 of dgx-a100" in page
    Path("search.json").write_text(json.dumps(call_json("search", *JOB, "--top", "5")), encoding="utf-8")
    assert call("report", "search.json", "--out", "search.html")[0] == 0


@pytest.mark.slow
def test_a_trace_has_a_replica_on_each_kind_of_chips(call, call_json, tmp_path):
    call("predict", *JOB, "--tp", "2", "--save", tmp_path / "plan.yaml")
    ranks = call_json("trace", tmp_path / "plan.yaml", "--out", tmp_path / "trace.json")["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 8]
    assert ["replica_wait" in rank["parts"] for rank in ranks] == [True, False]
    call("predict", *JOB, "--tp", "2", "--pp", "2", "--save", tmp_path / "plan.yaml")
    assert [rank["rank"] for rank in call_json("trace", tmp_path / "plan.yaml", "--out", tmp_path / "trace.json")["ranks"]] == [0, 8]


@pytest.mark.slow
def test_limits_of_pools_are_those_of_their_text(call_json, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pools.yaml").write_text(POOLS, encoding="utf-8")
    asked = ["limits", "--model", "gpt3-125m", "--seq-len", "1k", "--dp", "16", "--profile", "megatron", "--cluster"]
    text, in_file = (call_json(*asked, cluster)["limits"] for cluster in (MIX, "pools.yaml"))
    for name, limit in text.items():
        assert (limit["value"], limit["prediction"]["step_time"]) == (in_file[name]["value"], in_file[name]["prediction"]["step_time"])
    assert text["chips"]["prediction"]["plan"]["cluster"] == MIX


@pytest.mark.slow
def test_a_mix_is_sized_by_its_search(call):
    code, out, _ = call("search", *JOB, "--pp", "2", "--micro-batch", "1", "--tokens", "10B", "--by", "60d")
    assert code == 0
    assert f"16 chips of {MIX}" in out
