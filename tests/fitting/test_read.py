"""Files of measured runs: tables, JSON lines, logs as frameworks print them, traces; and what is none of these."""

import gzip
import json
from pathlib import Path

import pytest

import perfmodel
from perfmodel.fitting.read import read_rows
from perfmodel.fitting.schemas import MeasuredRunFile
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.plan import plan_to_dict
from perfmodel.parallel.plan_file import write_plan
from tests.fitting.made_up import BASE, csv_text, rows

MODELS = Path(perfmodel.__file__).parent / "workload" / "models"
JOB = {"model": "llama-3-8b", "cluster": "h100-sxm-80gb", "chips": 16, "fsdp": 16, "global_batch": 64, "seq_len": 4096}
STEP = 3.0
"""Seconds of a step of the logs below: 64 x 4,096 tokens on 16 chips are 5,461 tokens a second and chip."""


def torchtitan(step, time):
    rate = 64 * 4096 / 16 / time
    line = f"step: {step:2}  loss:  7.62585  grad_norm: 26.6250  memory: 66.91GiB(37.51%)  tps: {rate:,.0f}  tflops: 314.71  mfu: 13.99%"
    return f"\x1b[31m[rank0]:[titan] 2026-02-24 19:46:17,508 - root - INFO - {line}\n" * 2


def megatron(step, time):
    return (
        f" [2025-04-13 23:41:12] iteration {step:8}/    1000 | consumed samples: {step * 64:12} | elapsed time per iteration (ms): "
        f"{time * 1e3:.1f} | learning rate: 0.000000E+00 | global batch size:    64 | loss scale: 1.0 | number of nan iterations:   0 |\n"
    )


def nanotron(step, time):
    return (
        f"12/24/2024 10:00:00 [INFO|DP=0|PP=0|TP=0|ip-26]: iteration: {step} / 20 | consumed_tokens: 1.05M | "
        f"elapsed_time_per_iteration_ms: {time:.3g}K | tokens_per_sec: 87.4K | tokens_per_sec_per_gpu: 5.46K | global_batch_size: 64 | "
        "lm_loss: 11.1 | lr: 0.0003 | model_tflops_per_gpu: 250\n"
    )


def deepspeed(step, time):
    return (
        f"[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step={step * 4}/global_step={step}, "
        f"RunningAvgSamplesPerSec=20.0, CurrSamplesPerSec={64 / time}, MemAllocated=4.32GB, MaxMemAllocated=38.49GB\n"
    )


def deepspeed_pipeline(step, time):
    return f"steps: {step} loss: 4.5000 iter time (s): {time:.3f} samples/sec: {64 / time:.3f}\n"


def trainer(step, time):
    return f"\r {step}%|##   | {step}/100 [00:21<06:40,  {time:.2f}s/it]"


FORMATS = {
    torchtitan: "torchtitan",
    megatron: "Megatron-LM",
    nanotron: "nanotron",
    deepspeed: "DeepSpeed",
    deepspeed_pipeline: "DeepSpeed",
    trainer: "",
}


def log(line, steps=12):
    """Three slow steps of warm-up, then steady ones."""
    return "loading checkpoint, tp=2\n" + "".join(line(step, 9.0 if step < 4 else STEP) for step in range(1, steps + 1))


@pytest.mark.parametrize("line", FORMATS)
def test_a_log_gives_the_median_step_after_warm_up(line, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(log(line), newline="")
    (row,) = read_rows(path).rows
    assert row.values.get("framework", "") == FORMATS[line]
    fit = perfmodel.fit_runs(path, **JOB, profile=BASE)
    assert fit.runs[0].measured == pytest.approx(STEP, rel=2e-3)
    assert fit.runs[0].plan.layout.dp_shard == 16
    assert any("12 steps as" in note for note in fit.notes)


def test_the_trainers_summary_is_read_where_there_is_no_bar(tmp_path):
    path = tmp_path / "train.log"
    path.write_text(f"{{'train_runtime': 300.0, 'train_samples_per_second': 21.3, 'train_steps_per_second': {1 / STEP}, 'epoch': 1.0}}\n")
    fit = perfmodel.fit_runs(path, **JOB, profile=BASE)
    assert fit.runs[0].measured == pytest.approx(STEP)


def trace(times, *, ranks=16):
    events = [{"ph": "X", "cat": "kernel", "name": "ncclKernel", "pid": 0, "tid": 7, "ts": 1.0, "dur": 5.0, "args": {"stream": 7}}]
    for number, time in enumerate(times, 3):
        mark = {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{number}",
            "pid": 1,
            "tid": 1,
            "ts": 1.0,
            "dur": time * 1e6,
            "args": {"External id": 1},
        }
        events += [mark, {**mark, "cat": "gpu_user_annotation", "dur": 1.0}]
    return json.dumps({"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": ranks}, "traceEvents": events})


def test_a_trace_gives_its_profiled_steps(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(trace([8.0, STEP, STEP, STEP]).encode()))
    assert perfmodel.fit_runs(path, **JOB, profile=BASE).runs[0].measured == pytest.approx(STEP)


def test_what_run_appends_is_read(tmp_path):
    plan = perfmodel.predict(**JOB, profile=BASE).plan
    line = {"schema_version": 1, "plan": plan_to_dict(plan), "plan_hash": plan.hash(), "device": "cuda", "steps": 9, "step_time": STEP}
    (tmp_path / "runs.jsonl").write_text(json.dumps(line) + "\n")
    (run,) = perfmodel.fit_runs(tmp_path / "runs.jsonl", profile=BASE).runs
    assert (run.plan, run.measured) == (plan, STEP)


def test_a_table_may_name_plan_files(tmp_path):
    plan = perfmodel.predict(**JOB, profile=BASE).plan
    write_plan(plan, tmp_path / "plan.yaml")
    (tmp_path / "runs.csv").write_text(f"plan,step_time\n{tmp_path / 'plan.yaml'},{STEP}\n")
    assert perfmodel.fit_runs(tmp_path / "runs.csv", profile=BASE).runs[0].plan == plan


def test_a_plan_file_says_what_a_log_ran(tmp_path):
    plan = perfmodel.predict(**JOB, profile=BASE).plan
    (tmp_path / "train.log").write_text(log(deepspeed))
    fit = perfmodel.fit_runs(tmp_path / "train.log", plan=plan, profile=BASE)
    assert fit.runs[0].plan == plan


@pytest.mark.parametrize(
    ("content", "job", "says"),
    [
        (log(torchtitan), {}, "gives measurements only; say what it ran"),
        (log(torchtitan) + log(nanotron), JOB, "a profile is of one framework: give a log of one"),
        (log(megatron), {**JOB, "global_batch": 128}, "global_batch=128: must be 64, as the run itself wrote"),
        (trace([STEP], ranks=8), JOB, "chips=16: must be 8, as the run itself wrote"),
        (trace([]), JOB, r"a trace without steps \(ProfilerStep#N\)"),
        ("loss 3.2\nloss 3.1\n", JOB, "holds no step; give a table"),
        ("model,chip\nllama-3-8b\n", JOB, "has 1 cells under 2 columns"),
        ("tp,tp_size,step_time\n1,2,3\n", JOB, "says tp, which another column says too"),
        ('{"model": "llama-3-8b"}\n[1]\n', JOB, "must be a JSON object, not a list"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(content, job, says, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        perfmodel.fit_runs(path, **job, profile=BASE, save=tmp_path / "mine.yaml")
    assert not (tmp_path / "mine.yaml").exists()


def test_logs_of_two_frameworks_make_no_profile(tmp_path):
    for line in (torchtitan, nanotron):
        (tmp_path / line.__name__).write_text(log(line))
    with pytest.raises(InputError, match="a profile is of one framework"):
        perfmodel.fit_runs([tmp_path / "torchtitan", tmp_path / "nanotron"], **JOB)


def test_tables_with_semicolons_and_names_of_other_tools_are_read(tmp_path):
    path = tmp_path / "runs.txt"
    path.write_text(
        csv_text(rows()[:1])
        .replace(",", ";")
        .replace("global_batch", "Global Batch Size")
        .replace("step_time", "step time (s)")
        .replace("chips", "world size")
    )
    (row,) = read_rows(path).rows
    assert row.values["global_batch"] == "64"
    assert row.values["chips"] == "16"
    assert "step_time" in row.values


HEADING = "id,model,chip,chips,dp,zero,global_batch,seq_len,step_time\n"
RUN = "llama-3-8b,h100-sxm-80gb,16,16,3,64,4096"


def table(tmp_path, *times, heading=HEADING):
    path = tmp_path / "runs.csv"
    path.write_text(heading + "".join(f"run {index},{RUN},{time}\n" for index, time in enumerate(times)))
    return path


def test_a_small_file_that_unpacks_to_millions_of_runs_is_refused_at_the_limit(tmp_path):
    path = tmp_path / "bomb.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as packed:
        for _ in range(40):
            packed.write(b'{"model":"gpt2","step_time":1}\n' * 50_000)
    with pytest.raises(InputError, match="holds more than 10,000 runs"):
        read_rows(path)


@pytest.mark.parametrize(("line", "says"), [(b"\n", "lines"), (b"x" * 2**20, "holds no step")], ids=["blank-lines", "one-long-line"])
def test_what_unpacks_to_much_and_holds_no_run_is_refused_soon(line, says, tmp_path):
    path = tmp_path / "bomb.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as packed:
        packed.write(HEADING.encode() if line == b"\n" else b"")
        packed.write(line * (1_100_000 // len(line) + 1))
    with pytest.raises(InputError, match=says):
        read_rows(path)


def test_two_columns_with_one_heading_are_refused(tmp_path):
    path = table(tmp_path, "3.0,3.1", heading=HEADING.replace("step_time", "step_time,step_time"))
    with pytest.raises(InputError, match=r"runs\.csv line 1: two columns are called step_time; keep one of them"):
        read_rows(path)


def test_copies_of_a_run_count_once(tmp_path):
    once = perfmodel.fit_runs(table(tmp_path, 3.0, 3.2), profile=BASE)
    copied = perfmodel.fit_runs(table(tmp_path, 3.0, 3.2, *[3.0] * 20), profile=BASE)
    assert len(copied.runs) == 2
    assert copied.error_left_out == once.error_left_out
    assert any("20 rows are copies of another run" in note for note in copied.notes)


def test_a_file_given_twice_counts_once(tmp_path):
    path = table(tmp_path, 3.0, 3.2)
    assert len(perfmodel.fit_runs([path, path], profile=BASE).runs) == 2


@pytest.mark.parametrize(("written", "seconds"), [('"3,1"', 3.1), ('"3,1 s"', 3.1), ('"3,100.5 ms"', 3.1005), ('"3,1005"', 3.1005)])
def test_decimal_commas_and_thousands_are_read(written, seconds, tmp_path):
    path = table(tmp_path, written)
    path.write_text(path.read_text().replace(",4096,", ',"4,096",'))
    (run,) = perfmodel.fit_runs(path, profile=BASE).runs
    assert run.measured == pytest.approx(seconds)
    assert run.plan.job.seq_len == 4096


@pytest.mark.parametrize("written", ['"7,912"', '"7,912 s"'])
def test_a_time_that_may_have_either_comma_is_asked_about(written, tmp_path):
    with pytest.raises(InputError, match=r"write 7\.912 or 7912"):
        perfmodel.fit_runs(table(tmp_path, written), profile=BASE)


def test_a_model_file_that_was_edited_is_read_again(tmp_path):
    model = tmp_path / "config.json"
    config = json.loads((MODELS / "llama-3-8b.json").read_text())
    layers = []
    for number in (32, 16):
        model.write_text(json.dumps(config | {"num_hidden_layers": number}))
        path = table(tmp_path, 3.0 * number / 32)
        path.write_text(path.read_text().replace("llama-3-8b", str(model)))
        (run,) = perfmodel.fit_runs(path, profile=BASE).runs
        layers.append(run.plan.job.transformer.num_hidden_layers)
    assert layers == [32, 16]


def test_every_fault_of_a_row_is_named_at_once(tmp_path):
    path = tmp_path / "runs.csv"
    path.write_text("model,chip,chips,tp,settings,step_time\nllama-3-8b,h100-sxm-80gb,16,two,compile,4.2\n")
    with pytest.raises(InputError) as caught:
        read_rows(path)
    assert "runs.csv line 2: 2 faults" in str(caught.value)
    assert "tp=two: must be a whole number" in str(caught.value)
    assert "settings=compile: must be a JSON object" in str(caught.value)


def test_no_two_columns_share_a_name():
    fields = MeasuredRunFile.model_fields
    names = [alias for name, field in fields.items() for alias in (name, *field.json_schema_extra["aliases"])]
    assert sorted(names) == sorted(set(names))
