"""`perfmodel trace` from outside."""

import gzip
import json
from collections import Counter, defaultdict

import pytest

from tests.fitting.test_memory_snapshot import step_snapshot

JOB = ["--model", "gpt2", "--cluster", "dgx-h100", "--chips", 8, "--global-batch", 16, "--seq-len", "1k", "--pp", 2, "--tp", 2]


@pytest.fixture
def plan(call):
    assert call("predict", *JOB, "--save", "plan.yaml")[0] == 0
    return "plan.yaml"


def events(path, kind):
    opened = gzip.open if str(path).endswith(".gz") else open
    with opened(path, "rt") as stream:
        return [event for event in json.load(stream)["traceEvents"] if event["ph"] == kind]


def test_a_file_holds_one_rank_of_each_stage(call, call_json, plan, tmp_path):
    code, out, err = call("trace", plan, "--out", "trace.json")
    assert (code, err) == (0, "")
    assert "rank  stage  spans" in out
    predicted = call_json("predict", plan)
    result = call_json("trace", plan, "--out", "trace.json")
    assert [(rank["rank"], rank["stage"]) for rank in result["ranks"]] == [(0, 0), (4, 1)]
    assert any(rank["parts"] == pytest.approx(predicted["parts"], abs=1e-12) for rank in result["ranks"])
    assert result["step_time"] == predicted["step_time"]
    for rank in result["ranks"]:
        times, numbers = Counter(), Counter()
        for event in events(tmp_path / "trace.json", "X"):
            if event["pid"] == rank["rank"] and not event["args"].get("hidden"):
                times[event["args"]["part"]] += event["dur"] * 1e-6
                numbers[event["args"]["part"]] += 1
        for part, time in rank["parts"].items():
            assert times[part] == pytest.approx(time, abs=1e-9 * (numbers[part] + 1))


def test_slices_of_a_thread_nest_and_kernels_have_launches(call, plan, tmp_path):
    assert call("trace", plan, "--out", "trace.json")[0] == 0
    slices = events(tmp_path / "trace.json", "X")
    threads = defaultdict(list)
    for event in slices:
        start = round(event["ts"] * 1e3)
        threads[event["pid"], event["tid"]].append((start, -round(event["dur"] * 1e3)))
    for thread in threads.values():
        ends = []
        for start, length in sorted(thread):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or start - length <= ends[-1]
            ends.append(start - length)
    launched = {event["args"]["correlation"] for event in slices if event["cat"] == "cuda_runtime"}
    kernels = [event for event in slices if event["cat"] == "kernel"]
    assert {event["args"]["correlation"] for event in kernels} == launched
    assert {"ncclDevKernel_AllGather", "ncclDevKernel_ReduceScatter"} <= {event["name"] for event in kernels if event["tid"] == 16}
    assert all(event["args"]["stream"] == event["tid"] for event in kernels)
    assert [event["name"] for event in slices if event["name"].startswith("ProfilerStep#")] == ["ProfilerStep#0"] * 2
    assert max(sum(event["args"].values()) for event in events(tmp_path / "trace.json", "C")) > 1e9


def test_a_folder_has_one_file_for_each_rank(call, plan, tmp_path):
    assert call("trace", plan, "--out", "traces", "--ranks", "4,0,4")[0] == 0
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank0.json.gz", "rank4.json.gz"]
    with gzip.open(tmp_path / "traces" / "rank4.json.gz", "rt") as stream:
        text = stream.read()
    assert '"rank": 4' in text
    assert json.loads(text)["distributedInfo"] == {"backend": "nccl", "rank": 4, "world_size": 8}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "0,8"], "ranks=8: must be ranks of the plan, 0 to 7"),
        (["--ranks", "first"], "--ranks first: must be numbers"),
        (["--detail", "kernels"], "detail=kernels"),
        (["--out", "missing/trace.json"], "its folder does not exist"),
        (["--out", "missing/traces"], "its folder does not exist"),
    ],
)
def test_bad_input_is_one_sentence(call, plan, arguments, sentence):
    code, out, err = call("trace", plan, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_predicted_trace_read_as_a_measured_one_is_its_prediction(call, call_json, plan):
    assert call("trace", plan, "--out", "traces")[0] == 0
    files = [word for rank in (0, 4) for word in ("--measured", f"traces/rank{rank}.json.gz")]
    comparison = call_json("trace", *files, "--plan", plan)
    assert comparison["step_time"]["measured"] == pytest.approx(comparison["step_time"]["predicted"], rel=1e-6)
    for part in comparison["parts"]:
        assert part["measured"] == pytest.approx(part["predicted"], abs=1e-3 * comparison["step_time"]["predicted"]), part["part"]
    code, out, err = call("trace", *files, "--plan", plan)
    assert (code, err) == (0, "")
    assert "no part differs by more than 0.5 % of the step" in " ".join(out.split())


def test_a_measured_step_is_a_run_that_fit_reads(call, call_json, plan):
    assert call("trace", plan, "--ranks", 0, "--out", "trace.json")[0] == 0
    assert call("trace", plan, "--measured", "trace.json", "--out", "run.jsonl")[0] == 0
    (run,) = call_json("fit", "run.jsonl")["runs"]
    assert run["measured"] == pytest.approx(call_json("predict", plan)["step_time"], rel=1e-6)


def test_a_trace_of_a_rank_that_the_plan_lacks_is_refused(call, plan, tmp_path):
    assert call("trace", plan, "--ranks", 4, "--out", "trace.json")[0] == 0
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text.replace('"rank": 4', '"rank": 8', 1))
    code, out, err = call("trace", plan, "--measured", "trace.json")
    assert (code, out) == (2, "")
    assert "traces=trace.json: is of rank 8, and the plan has 8 ranks; give the plan that ran" in err


@pytest.mark.slow
def test_a_plan_of_a_network_is_drawn(call, call_json):
    network = ["shard", "alexnet", "--cluster", "dgx-h100", "--chips", 4, "--batch", 64]
    assert call(*network, "--stages", 2, "--save", "net.yaml")[0] == 0
    result = call_json("trace", "net.yaml", "--out", "net.json")
    assert len(result["ranks"]) == 2
    assert all(sum(rank["parts"].values()) == result["step_time"] for rank in result["ranks"])


def test_the_largest_difference_is_named(call, call_json, plan, tmp_path):
    assert call("trace", plan, "--ranks", 0, "--out", "trace.json")[0] == 0
    content = json.loads((tmp_path / "trace.json").read_text())
    content["traceEvents"] = [event for event in content["traceEvents"] if not event["name"].startswith("flash_attention")]
    (tmp_path / "trace.json").write_text(json.dumps(content))
    comparison = call_json("trace", plan, "--measured", "trace.json")
    assert "the largest unexplained part is idle: measured" in comparison["summary"]
    alone = call_json("trace", "--measured", "trace.json")
    assert [set(part) for part in alone["parts"]] == [{"part", "measured"}] * len(comparison["parts"])
    assert "measured step of" in call("trace", "--measured", "trace.json")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "plan: is missing"),
        (["fsdp", "--plan", "fsdp"], "give one of them"),
        (["--measured", "missing.json"], "missing.json: cannot be read as a trace (No such file or directory)"),
        (["--measured", "missing.json", "--ranks", "0"], "--ranks: is for a predicted trace"),
        (["--measured", "missing.json", "--out", "run.jsonl"], "out=run.jsonl: needs the plan that ran; give it with --plan"),
        (["ddp", "--steps", "2"], "--steps: is for a measured trace"),
        (["--measured", "missing.json", "--steps", "0"], "steps=0: must be a positive number of steps"),
        (["--measured", "missing.pickle"], "missing.pickle: cannot be read as a memory snapshot (No such file or directory)"),
        (["--measured", "missing.json", "--out", "run.csv"], "out=run.csv: must end in .jsonl with what was measured; write runs.jsonl"),
    ],
)
def test_bad_measured_input_is_one_sentence(call, arguments, sentence):
    code, out, err = call("trace", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


def test_a_memory_snapshot_is_compared_with_the_predicted_memory(call, call_json, plan, tmp_path):
    step_snapshot(tmp_path / "snapshot.pickle")
    code, out, err = call("trace", "--measured", "snapshot.pickle", "--plan", plan)
    assert (code, err) == (0, "")
    assert "peak in tensors 0.22 GiB, predicted" in out
    assert "job/model.py:42 forward" in out
    comparison = call_json("trace", "--measured", "snapshot.pickle", "--plan", plan)
    predicted = call_json("predict", plan)["memory"]
    assert {name: comparison["predicted"][name] for name in predicted} == predicted
    assert comparison["measured"]["allocated"] == comparison["snapshots"][0]["allocated"] == 230 * 2**20
    alone = call_json("trace", "--measured", "snapshot.pickle")
    assert "predicted" not in alone
    assert "measured peak of 230.0 MiB in tensors" in call("trace", "--measured", "snapshot.pickle")[1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--out", "run.jsonl"], "out=run.jsonl: needs the plan that ran; give it with --plan"),
        (["--steps", 2], "--steps: is for traces"),
        (["--measured", "trace.json"], "snapshot.pickle: is a memory snapshot among traces"),
    ],
)
def test_a_memory_snapshot_takes_no_options_of_traces(call, tmp_path, arguments, sentence):
    step_snapshot(tmp_path / "snapshot.pickle")
    code, out, err = call("trace", "--measured", "snapshot.pickle", *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("word", [("--profile", "deepspeed"), ("--calibration", "spec-sheet"), ("--setting", "compile=true")])
def test_what_is_assumed_holds_for_the_trace_and_the_export_of_a_plan_file(call_json, call, word):
    stated, unstated = call_json("predict", "fsdp", *word)["step_time"], call_json("predict", "fsdp")["step_time"]
    assert stated != unstated
    assert call_json("trace", "fsdp", *word)["step_time"] == pytest.approx(stated, rel=1e-9)
    code, _, error = call("export", "fsdp", "--to", "torchtitan", word[0], "no-such=1")
    assert code == 2
    assert "no-such" in error
