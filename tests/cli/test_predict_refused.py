"""`perfmodel predict` of what cannot be: one sentence, exit code 2, and nothing half-written."""

import json
import os
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel.cli import app as cli
from tests.cli.conftest import JOB, with_flags

BAD = {
    "chip": (["--cluster", "no-such"], "cluster=no-such"),
    "model": (["--model", "no-such"], "model=no-such"),
    "heads": (["--chips", "48", "--tp", "6"], "tp=6: must divide num_attention_heads=32"),
    "degree": (["--tp", "3"], "tp=3: must divide chips=64"),
    "zero degree": (["--tp", "0"], "tp=0"),
    "words": (["--tp", "two"], "tp=two: must be a whole number"),
    "batch": (["--global-batch", "100"], "must divide global_batch=100"),
    "no batch": (["--global-batch", "0"], "global_batch"),
    "zero": (["--zero", "4"], "zero=4"),
    "schedule": (["--schedule", "zigzag"], "schedule=zigzag"),
    "recompute": (["--recompute", "some"], "recompute=some"),
    "precision": (["--precision", "fp4"], "precision=fp4"),
    "optimizer": (["--optimizer", "lbfgs"], "optimizer=lbfgs"),
    "training": (["--train", "lora"], "train=lora: has no rank; write lora:16"),
    "adapters": (["--train", "lora:16:query"], "query: is no linear operator of a layer of llama-3.2-1b; use q_proj, k_proj"),
    "attention": (["--attention", "none"], "attention=none"),
    "profile": (["--profile", "none"], "profile=none"),
    "profile of another trainer": (["--profile", "MaxTex"], "profile=MaxTex: not known; did you mean 'maxtext'?"),
    "offloads": (["--offload", "none,optimizer"], "offload=none,optimizer: names none next to others"),
    "calibration": (["--calibration", "none"], "calibration=none"),
    "order": (["--order", "tp-pp"], "order=tp-pp"),
    "headroom": (["--memory-headroom", "10 GB"], "memory_headroom='10 GB'"),
    "whole headroom": (["--memory-headroom", "100%"], "memory_headroom=100%"),
    "tokens": (["--tokens", "many"], "tokens='many'"),
    "chips": (["--chips", "64,x"], "chips=x: must be a whole number"),
    "figure": (["--plot", "plan.txt"], "plot=plan.txt"),
    "figure's folder": (["--plot", "no/such/plan.png"], "its folder does not exist"),
    "folder": (["--save", "no/such/plan.yaml"], "its folder does not exist"),
    "ending": (["--save", "plan.txt"], "must end in .yaml"),
    "flag": (["--no-such-flag"], "No such option"),
    "sequence parallel": (["--sequence-parallel"], "sequence_parallel=true"),
}


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.replace(" ", "-"))
def test_bad_input_is_one_sentence(case, call, tmp_path):
    flags, expected = BAD[case]
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call("predict", *with_flags(JOB, *flags))
    assert (code, out) == (2, "")
    assert expected in err
    assert err.startswith("perfmodel: ")
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_missing_flag_says_what_to_give(call):
    for flag in ("--model", "--cluster", "--chips", "--global-batch", "--seq-len"):
        index = JOB.index(flag)
        code, _, err = call("predict", *JOB[:index], *JOB[index + 2 :])
        assert code == 2
        assert flag.strip("-") in err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("schema_version: 99\nkind: plan\n", "schema_version=99"),
        ("not a plan", "mapping"),
        ("a: [", "not valid YAML"),
        ("schema_version: 1\njob: {model: gpt2, global_batch: 1, seq_len: 1}\nlayout: {}\nnonsense: 1\n", "nonsense"),
    ],
    ids=["version", "text", "broken", "field"],
)
def test_a_bad_plan_file_is_one_sentence(text, expected, call, tmp_path):
    (tmp_path / "plan.yaml").write_text(text)
    code, out, err = call("predict", "plan.yaml")
    assert (code, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1


def test_an_unsupported_config_says_what_is_missing(call, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "num_hidden_layers": 2}))
    code, out, err = call("predict", *JOB, "--model", tmp_path / "config.json")
    assert (code, out) == (2, "")
    assert "mamba" in err


@pytest.mark.parametrize("flags", [["--save", "plan.yaml"], ["--plot", "plan.png"]], ids=["save", "plot"])
def test_a_full_disk_leaves_nothing(flags, call, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / flags[1]).write_text("before")
    monkeypatch.setattr(os, "fsync", full)
    code, out, err = call("predict", *JOB, *flags)
    assert (code, out) == (2, "")
    assert "No space left on device" in err
    assert err.count("\n") == 1
    assert (tmp_path / flags[1]).read_text() == "before"
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


FLAGS = ("--tp", "--pp", "--cp", "--dp-replicate", "--dp-shard", "--zero", "--micro-batch", "--virtual-stages", "--chips", "--global-batch",
         "--seq-len", "--schedule", "--recompute", "--order", "--tokens", "--memory-headroom", "--profile", "--attention", "--model",
         "--cluster", "--precision", "--optimizer", "--calibration")  # fmt: skip
VALUES = st.one_of(
    st.integers(-3, 70).map(str),
    st.sampled_from(["interleaved", "full", "selective", "unfused", "fp32", "1e9", "99999999999999999999", "10%", "nan", "", " ", "../x"]),
    st.text(string.printable, max_size=6),
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FLAGS), VALUES, max_size=4))
@pytest.mark.slow
def test_any_flags_give_a_prediction_or_a_sentence(capfd, flags):
    job = ["--model", "gpt2", "--cluster", "dgx-h100", "--chips", "8", "--global-batch", "32", "--seq-len", "512"]
    code = cli.run(["predict", *job, "--json", *(part for pair in flags.items() for part in pair)])
    out, err = capfd.readouterr()
    if code == 0:
        assert err == ""
        assert "step_time" in out
    else:
        assert (code, out) == (2, "")
        assert json.loads(err)["message"]
        assert err.count("\n") == 1


@pytest.mark.parametrize(
    "line, words",
    [
        ("recompute_operators: [foo]", "recompute_operators=foo: no operator of a layer of llama-3.2-1b"),
        ("recompute_operators: [lm_head]", "recompute_operators=lm_head: no operator of a layer"),
        ("kind: banana", "kind='banana': must be plan"),
    ],
)
def test_a_plan_file_says_nothing_that_would_do_nothing(call, tmp_path, line, words):
    path = tmp_path / "plan.yaml"
    assert call("predict", *JOB, "--tp", 2, "--recompute", "selective", "--save", path)[0] == 0
    field = line.partition(":")[0]
    lines = [line if old.startswith(f"{field}:") else old for old in path.read_text(encoding="utf-8").splitlines()]
    path.write_text("\n".join(lines), encoding="utf-8")
    code, _, error = call("predict", path)
    assert code == 2
    assert words in error
    path.write_text(path.read_text(encoding="utf-8").replace(line, f"{field}: {'plan' if field == 'kind' else '[gate_product]'}"))
    assert call("predict", path)[0] == 0


KNOBS_OF_EXPERTS = {"ep": "4", "etp": "2", "dispatcher": "flex"}


@pytest.mark.parametrize("knob", KNOBS_OF_EXPERTS)
@pytest.mark.parametrize("verb", ["predict", "search", "explain", "predict plan"])
def test_a_knob_of_experts_is_refused_for_a_model_without_experts(verb, knob, call, tmp_path):
    value = KNOBS_OF_EXPERTS[knob]
    if verb in ("predict", "search"):
        code, out, err = call(verb, *JOB, f"--{knob}", value)
    else:
        call("predict", *JOB, "--save", "plan.yaml")
        flags = ("--why-not", f"{knob}={value}") if verb == "explain" else (f"--{knob}", value)
        code, out, err = call(verb.split()[0], "plan.yaml", *flags)
    assert (code, out) == (2, "")
    assert err == f"perfmodel: {knob}={value}: llama-3.2-1b has no experts; leave out {knob}\n"


def test_a_risk_is_a_probability_that_float64_can_tell_from_certainty(call):
    code, _, err = call("predict", *JOB, "--risk", "1e-20")
    assert code == 2
    assert "risk=1e-20: must be a probability between 0 and 1, at least 1e-09" in err


def test_a_risk_stands_in_place_of_a_headroom(call):
    code, _, err = call("predict", *JOB, "--risk", "5%", "--memory-headroom", "10%")
    assert code == 2
    assert err.startswith("perfmodel: --risk: cannot be given with --memory-headroom")


REMEDIES = {
    "micro batch": (["--micro-batch", "100"], "use 1, 2, 4 or 8"),
    "sequence length": (["--seq-len", "8,192"], "write 8192"),
    "expert tensor parallelism": (
        ["--model", "mixtral-8x7b", "--ep", "2", "--tp", "4"],
        "use ep=4, or etp=4 (--etp 4, Megatron's --expert-tensor-parallel-size)",
    ),
}


@pytest.mark.parametrize("case", REMEDIES)
def test_a_remedy_names_what_works(case, call):
    flags, says = REMEDIES[case]
    code, _, err = call("predict", *with_flags(JOB, *flags))
    assert code == 2
    assert says in err


def test_a_file_that_is_no_plan_says_which_file_is_one(call, tmp_path):
    (tmp_path / "cluster.yaml").write_text("name: mine\nchip: h100-sxm-80gb\n")
    code, _, err = call("predict", "cluster.yaml")
    assert code == 2
    assert "is neither a plan of perfmodel nor a configuration of a framework that is known" in err


def test_a_calibration_of_another_chip_is_named(call_json):
    prediction = call_json("predict", *JOB, "--calibration", "a100")
    assert any("was measured on a100" in warning and "not on h100" in warning for warning in prediction["warnings"])
    assert not any("was measured on" in warning for warning in call_json("predict", *JOB, "--calibration", "h100")["warnings"])


def test_more_chips_than_a_fabric_states_are_assumed_to_be_like_the_others(call_json):
    prediction = call_json("predict", *with_flags(JOB, "--chips", "100000", "--global-batch", "100000"), "--zero", 1)
    assert any("more are assumed to have the same bandwidth and latency" in warning for warning in prediction["warnings"])
