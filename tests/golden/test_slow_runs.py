"""Public slow runs: the largest unexplained part is the cause that their authors found."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

import perfmodel
from perfmodel.parallel.measured import COMPUTE, HOST, group_of

FOLDER = Path(__file__).parent
CASES = yaml.safe_load((FOLDER / "slow_runs.yaml").read_text())
NAMES = {"matmul": "gemm", "attention": "flash_attention", "elementwise": "elementwise_kernel", "optimizer": "multi_tensor_apply"}


def plan_of(case, folder):
    if "network" in case:
        words = dict(case["network"])
        return perfmodel.shard_network(words.pop("network"), **words).best.plan
    words = dict(case["job"])
    if "model" in case:
        words["model"] = folder / "config.json"
        words["model"].write_text(json.dumps(case["model"]))
    return perfmodel.predict(**words).plan


def stated_trace(case, plan, path):
    """A trace of one step with the numbers of a thread: its kernels one after the other, then what the host does alone."""
    parts = defaultdict(float)
    for span in perfmodel.trace_plan(plan, ranks=[0], detail="passes")[0].spans:
        group = group_of(span.part, span.kind)
        if not span.hidden and group in COMPUTE[:3]:
            parts[group] += span.time
    kernels = [(NAMES[group], case["other"] * time / sum(parts.values())) for group, time in parts.items()]
    events, now = [("user_annotation", "ProfilerStep#0", 0.0, case["step"])], 0.0
    for category, work in (("kernel", [*kernels, *case.get("kernels", [])]), ("user_annotation", case.get("host", []))):
        for name, time in work:
            events.append(("gpu_memcpy" if name.startswith("Memcpy") else category, name, now, time))
            now += time
    keys = ("ph", "pid", "tid", "cat", "name", "ts", "dur")
    slices = [dict(zip(keys, ("X", 0, 0, category, name, 1e6 * at, 1e6 * time), strict=True)) for category, name, at, time in events]
    path.write_text(json.dumps({"traceEvents": slices}))
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_the_largest_unexplained_part_is_the_cause_that_the_authors_found(case, tmp_path):
    plan = plan_of(case, tmp_path)
    trace = FOLDER / "traces" / case["trace"] if "trace" in case else stated_trace(case, plan, tmp_path / "trace.json")
    compared = perfmodel.compare_trace(trace, plan)
    largest = compared.largest_difference
    if largest == "idle":
        largest += f"/{max(HOST, key=lambda host: compared.idle[host])}"
    assert (largest == case["part"]) is case["found"], largest


def test_all_seven_causes_are_found():
    assert [case["found"] for case in CASES] == 7 * [True]


def test_with_workers_the_same_step_does_not_wait_for_data():
    slow, fast = (perfmodel.compare_trace(FOLDER / "traces" / f"resnet50-workers-{workers}.json.gz") for workers in (0, 4))
    assert slow.idle["data_loading"] > 0.3 * slow.measured
    assert fast.idle["data_loading"] < 0.02 * fast.measured
    assert slow.groups["matmul"][1] == pytest.approx(fast.groups["matmul"][1], rel=0.02)


def test_the_page_lists_the_cases():
    page = (FOLDER.parents[1] / "docs" / "how-to" / "trace.md").read_text()
    for row in table():
        assert row in page


def table():
    """The rows of the page's table."""
    yield "| run | cause that the authors found | part | found |"
    yield "|---|---|---|---|"
    for case in CASES:
        source = case["source"].split(" ")[0].rstrip(",;")
        link = f"[{case['id']}]({source if source.startswith('https') else f'https://github.com/{source}'})"
        part = case["part"].replace("_", " ").replace("/", ": ")
        yield f"| {link} | {case['cause']} | {part} | {'yes' if case['found'] else 'no'} |"
