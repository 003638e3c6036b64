"""Traces of torch.profiler, recorded here on the CPU and made by hand for a GPU."""

import gzip
import json

import pytest

import perfmodel
from perfmodel.fitting.measured_trace import read_trace
from perfmodel.foundation.errors import InputError
from perfmodel.parallel.measured import GROUPS
from perfmodel.report.document import Notes
from perfmodel.report.trace import comparison_blocks

US = 1e-6


def kernel(name, start, length, number, *, stream=7, launched=None, category="kernel", **known):
    args = {"stream": stream, "correlation": number, **{key.replace("_", " "): value for key, value in known.items()}}
    launch = start - 5 if launched is None else launched
    yield {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 9, "tid": 9, "ts": launch, "dur": 2, "args": args}
    yield {"ph": "X", "cat": category, "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length, "args": args}


def step(number, start, length):
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"ProfilerStep#{number}",
        "pid": 9,
        "tid": 9,
        "ts": start,
        "dur": length,
        "args": {},
    }


def one_step(at, number):
    """400 us: a matmul, attention, an all-reduce of which 20 us lie under a norm, an optimizer kernel, a copy; the rest idle."""
    begin = 100 * number
    yield from kernel("sm90_xmma_gemm_bf16", at + 10, 100, begin)
    yield from kernel("flash_fwd_kernel", at + 110, 50, begin + 1)
    tp = {"Process_Group_Description": "mesh_tp", "Group_size": 8}
    yield from kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", at + 160, 60, begin + 2, stream=16, **tp)
    yield from kernel("void rms_norm_kernel", at + 200, 30, begin + 3)
    yield from kernel("multi_tensor_apply_kernel", at + 240, 40, begin + 4)
    yield from kernel("Memcpy DtoD", at + 290, 10, begin + 5, category="gpu_memcpy")


def gpu_trace(path, *, steps=4, extra=(), **top):
    events = [step(i, 400 * i, 400) for i in range(steps)]
    for i in range(steps):
        events += one_step(400 * i, i)
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*events, *extra], **top}))
    return path


def test_each_instant_belongs_to_one_group(tmp_path):
    trace = read_trace(gpu_trace(tmp_path / "t.json", distributedInfo={"rank": 3, "world_size": 8}))
    assert (trace.rank, trace.device, trace.num_steps) == (3, "GPU", 2)
    assert trace.step_time == pytest.approx(400 * US)
    expected = {"matmul": 100, "attention": 50, "elementwise": 30, "optimizer": 40, "tensor_parallel_communication": 40, "copies": 10}
    assert {name: time for name, time in trace.groups.items() if time > 1e-12 and name != "idle"} == pytest.approx(
        {name: time * US for name, time in expected.items()}
    )
    assert trace.groups["idle"] == pytest.approx(130 * US)
    assert trace.overlapped == pytest.approx(20 * US)
    assert tuple(trace.groups) == GROUPS


def test_a_kernel_belongs_to_the_step_that_launched_it(tmp_path):
    late = kernel("gemm", 795, 3, 999, launched=390)
    trace = read_trace(gpu_trace(tmp_path / "t.json", steps=3, extra=late))
    assert trace.groups["matmul"] == pytest.approx(100 * US)  # of step 1: the late one is of step 0


def test_compressed_files_and_single_steps_are_read(tmp_path):
    text = gpu_trace(tmp_path / "t.json", steps=1).read_bytes()
    (tmp_path / "t.json.gz").write_bytes(gzip.compress(text))
    assert read_trace(tmp_path / "t.json.gz").step_time == pytest.approx(400 * US)


@pytest.mark.parametrize(
    ("name", "known", "group"),
    [
        ("ncclDevKernel_AllGather_RING_LL", {}, "parameter_gather"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", {"Process_Group_Description": "mesh_dp_shard"}, "gradient_reduction"),
        ("ncclDevKernel_AllReduce_Sum_bf16", {"Process_Group_Description": "TENSOR_MODEL_PARALLEL_GROUP"}, "tensor_parallel_communication"),
        ("ncclDevKernel_SendRecv", {"Process_Group_Description": "PIPELINE_MODEL_PARALLEL_GROUP"}, "pipeline_communication"),
        ("ncclDevKernel_SendRecv", {"Process_Group_Description": "EXPERT_MODEL_PARALLEL_GROUP"}, "expert_parallel_communication"),
        ("ncclDevKernel_SendRecv", {"Process_Group_Description": "CONTEXT_PARALLEL_GROUP"}, "context_parallel_communication"),
        ("ncclDevKernel_AllReduce_Sum_f32", {"Process_Group_Description": "DATA_PARALLEL_GROUP_WITH_CP"}, "gradient_reduction"),
        ("nvjet_tst_256x128", {}, "matmul"),
        ("void at::native::vectorized_elementwise_kernel", {}, "elementwise"),
        ("multi_tensor_apply_kernel<CopyFunctor>", {}, "elementwise"),
        ("my_kernel", {}, "other_kernels"),
    ],
)
def test_kernels_by_group(tmp_path, name, known, group):
    before = read_trace(gpu_trace(tmp_path / "a.json", steps=1)).groups[group]
    trace = read_trace(gpu_trace(tmp_path / "b.json", steps=1, extra=kernel(name, 320, 25, 500, stream=30, **known)))
    assert trace.groups[group] - before == pytest.approx(25 * US)
    assert trace.unknown == (("my_kernel",) if group == "other_kernels" else ())


def test_a_collective_without_description_is_of_the_only_axis_of_its_size(tmp_path):
    plan = perfmodel.predict(model="gpt2", cluster="dgx-h100", chips=8, global_batch=8, seq_len=1024, tp=4).plan
    event = kernel("ncclDevKernel_AllReduce_Sum_bf16", 320, 25, 500, stream=30, Group_size=4)
    trace = read_trace(gpu_trace(tmp_path / "t.json", steps=1, extra=event), plan)
    assert trace.groups["tensor_parallel_communication"] == pytest.approx(65 * US)


def test_operators_of_a_cpu_are_recorded_and_read(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, schedule

    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.LayerNorm(1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=1, active=3, repeat=1)) as prof:
        for _ in range(4):
            model(torch.randn(128, 256)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    prof.export_chrome_trace(str(tmp_path / "cpu.json"))
    trace = read_trace(tmp_path / "cpu.json")
    assert (trace.device, trace.num_steps, trace.rank) == ("CPU", 2, 0)
    assert sum(trace.groups.values()) == pytest.approx(trace.step_time)
    assert all(trace.groups[name] > 0 for name in ("matmul", "elementwise", "optimizer"))
    assert min(trace.groups.values()) >= 0


def host(name, start, length, category="user_annotation"):
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": 9, "ts": start, "dur": length, "args": {}}


def test_idle_time_is_split_by_what_the_host_does(tmp_path):
    # idle: 0-10, 230-240, 280-290 and 300-400
    events = [
        host("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 300, 30),
        host("Optimizer.step#AdamW.step", 320, 30),
        host("cudaStreamSynchronize", 270, 12, "cuda_runtime"),
    ]
    trace = read_trace(gpu_trace(tmp_path / "t.json", steps=1, extra=events))
    expected = {"data_loading": 30, "optimizer_step": 20, "after_synchronization": 10, "launches_or_bubble": 70}
    assert dict(trace.idle) == pytest.approx({name: time * US for name, time in expected.items()})
    assert sum(trace.idle.values()) == pytest.approx(trace.groups["idle"])


@pytest.mark.parametrize("correlation", [[1], None, {}, 1.5])
def test_kernels_with_a_damaged_correlation_are_placed_by_their_own_time(tmp_path, correlation):
    trace = read_trace(gpu_trace(tmp_path / "t.json", steps=1, extra=kernel("gemm", 320, 25, correlation)))
    assert trace.groups["matmul"] == pytest.approx(125 * US)


def test_kernels_of_the_optimizers_step_are_its_own(tmp_path):
    event = kernel("void vectorized_elementwise_kernel", 320, 25, 500, launched=310)
    extra = [*event, host("Optimizer.step#SGD.step", 305, 10)]
    trace = read_trace(gpu_trace(tmp_path / "t.json", steps=1, extra=extra))
    assert (trace.groups["optimizer"], trace.groups["elementwise"]) == pytest.approx((65 * US, 30 * US))


def test_categories_of_old_versions_of_torch_are_read(tmp_path):
    text = gpu_trace(tmp_path / "new.json").read_text()
    for new, old in (("kernel", "Kernel"), ("gpu_memcpy", "Memcpy"), ("cuda_runtime", "Runtime"), ("user_annotation", "Operator")):
        text = text.replace(f'"cat": "{new}"', f'"cat": "{old}"')
    events = json.loads(text)["traceEvents"]
    for event in events:
        event["ts"] += 1623142623460172  # they count from 1970
    (tmp_path / "old.json").write_text(json.dumps({"traceEvents": events}))
    new, old = read_trace(tmp_path / "new.json"), read_trace(tmp_path / "old.json")
    assert (old.device, old.num_steps, dict(old.groups)) == ("GPU", 2, pytest.approx(dict(new.groups)))


def unmarked(path, *, updates=4):
    gpu_trace(path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if not event["name"].startswith("ProfilerStep")]
    events += [host("Optimizer.step#AdamW.step", 400 * i + 300, 90) for i in range(updates)]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_steps_without_marks_end_with_the_optimizers(tmp_path):
    marked, unmarked_trace = read_trace(gpu_trace(tmp_path / "a.json")), read_trace(unmarked(tmp_path / "b.json"))
    assert unmarked_trace.num_steps == 2
    assert unmarked_trace.step_time == pytest.approx(marked.step_time)
    assert unmarked_trace.groups["matmul"] == pytest.approx(marked.groups["matmul"])
    assert unmarked_trace.note == "no step is marked: read as 4 steps, each of which ends with the optimizer's"


def test_steps_without_marks_and_annotations_end_with_the_optimizers_kernels(tmp_path):
    text = unmarked(tmp_path / "b.json", updates=0).read_text().replace("multi_tensor_apply_kernel", "multi_tensor_apply<FusedAdam>")
    (tmp_path / "b.json").write_text(text)
    marked, unmarked_trace = read_trace(gpu_trace(tmp_path / "a.json")), read_trace(tmp_path / "b.json")
    assert (unmarked_trace.num_steps, unmarked_trace.step_time) == (2, pytest.approx(marked.step_time))
    assert dict(unmarked_trace.groups)["matmul"] == pytest.approx(marked.groups["matmul"])


def test_the_rank_that_the_others_wait_for_is_named(tmp_path):
    def rank(number, compute):
        events = [step(0, 0, 400), *kernel("gemm", 0, compute, 1), *kernel("ncclDevKernel_AllReduce_Sum_f32", compute, 390 - compute, 2)]
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": number}}))
        return path

    compared = perfmodel.compare_trace([rank(0, 150), rank(1, 350), rank(2, 100)])
    assert compared.straggler == (1, pytest.approx(225 * US))
    notes = [note for block in comparison_blocks(compared, None, []) if isinstance(block, Notes) for note in block.notes]
    assert "rank 1 communicates least: the others wait for it, 225.0 us on average" in notes
    assert perfmodel.compare_trace(rank(0, 150)).straggler == (0, 0.0)


@pytest.mark.parametrize(("updates", "steps", "read"), [(0, None, "one step"), (1, None, "one step"), (4, 4, "4 steps")])
def test_a_trace_without_marks_is_one_step_or_the_given_number(tmp_path, updates, steps, read):
    trace = read_trace(unmarked(tmp_path / "t.json", updates=updates), steps=steps)
    assert trace.groups["matmul"] * (steps or 1) == pytest.approx(400 * US)
    assert trace.num_steps == (steps or 1)
    assert trace.note.startswith(f"no step is marked: the trace is read as {read}; mark steps with prof.step()")


def test_the_number_of_marked_steps_is_not_given(tmp_path):
    with pytest.raises(InputError, match=r"marks its steps .* leave out steps=2"):
        read_trace(gpu_trace(tmp_path / "t.json"), steps=2)
    with pytest.raises(InputError, match="steps=0: must be a positive number of steps"):
        perfmodel.compare_trace(tmp_path / "t.json", steps=0)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{", "cannot be read as a trace"),
        (b"\x1f\x8b123", "cannot be read as a trace"),
        (b"[1]", "is no trace"),
        (b'{"traceEvents": []}', "a trace without steps"),
        (json.dumps({"traceEvents": [step(0, 5, 0)]}).encode(), "its steps take no time"),
        (
            json.dumps({"traceEvents": [None, {"ph": "X", "ts": "x"}, step(0, 0, 9), *kernel("mine", 5, 2, 1)]}).encode(),
            "no kernel of it is known",
        ),
    ],
)
def test_other_files_are_refused_in_one_sentence(tmp_path, content, sentence):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(InputError, match=sentence):
        read_trace(tmp_path / "t.json")
