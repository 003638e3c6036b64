"""Measured peaks of memory: where they are read from, and what a fit makes of them."""

import json
import math

import pytest

import perfmodel
from perfmodel.fitting.read import read_rows
from perfmodel.foundation.errors import InputError
from perfmodel.frameworks.profile import KNOWN, UNKNOWN, load_profile, shipped_memory_uncertainties, uncertainty_of_memory
from perfmodel.parallel.knobs import Knobs
from perfmodel.parallel.request import Request
from perfmodel.verbs.confidence import interval_in
from perfmodel.verbs.requests import setting_of_request
from perfmodel.verbs.setting import plan_in
from tests.fitting.made_up import BASE, JOB, PLANS, jsonl_text
from tests.fitting.test_memory_snapshot import FORWARD, MIB, block, snapshot

FACTOR = 1.4
#: One line of each framework, after one of a step.
LOGGED = {
    "torchtitan": ("step:  9  loss:  7.62  grad_norm: 26.62  memory: 66.91GiB(37.51%)  tps: 6,600  mfu: 13.99%", 66.91 * 2**30),
    "Megatron-LM": (
        " iteration 9/ 100 | elapsed time per iteration (ms): 900.0 | global batch size: 64 |\n"
        "[Rank 1] (after 9 iterations) memory (MB) | max allocated: 21310.4 | reserved: 22500.0 | max reserved: 22560.0",
        22560 * MIB,
    ),
    "nanotron": (
        "iteration: 9 / 100 | elapsed_time_per_iteration_ms: 900\n Peak allocated 2101.13MiB. Peak reserved: 3000.00MiB",
        3000 * MIB,
    ),
}  # fmt: skip


def peaks(profile, kind="reserved"):
    """Runs with the peaks that this profile predicts, and no step time."""
    runs = []
    for plan in PLANS[:3]:
        asked = {**JOB, **plan}
        memory = perfmodel.predict(cluster=asked.pop("chip"), **asked, profile=profile).memory
        beyond = memory["framework"] + (memory["allocator"] if kind == "allocated" else 0.0)
        name = {"reserved": "peak_memory", "allocated": "max_memory_allocated"}[kind]
        runs.append({"id": f"run-{len(runs)}", **JOB, **plan, name: memory["total"] - beyond})
    return runs


@pytest.fixture(scope="module")
def fit():
    return perfmodel.fit_runs(peaks(load_profile(BASE).having(reserve_factor=FACTOR)), profile=BASE)


def test_peaks_determine_what_the_allocator_holds(fit):
    memory = fit.memory
    assert memory.behaviour.determined == "by the runs"
    assert 1.2 < memory.behaviour.value < FACTOR + 0.05
    assert memory.error_after < memory.error_left_out < 0.5 * memory.error_before


def test_the_next_peak_is_predicted_better_and_no_time_moves(fit):
    asked = {"model": "llama-3-8b", "cluster": "h100-sxm-80gb", "chips": 8, "global_batch": 64, "seq_len": 8192, "fsdp": 8}
    truth, before, after = (
        perfmodel.predict(**asked, profile=profile) for profile in (load_profile(BASE).having(reserve_factor=FACTOR), BASE, fit.profile)
    )
    assert abs(after.memory["total"] / truth.memory["total"] - 1) < 0.5 * abs(before.memory["total"] / truth.memory["total"] - 1)
    assert after.fits_probability < before.fits_probability
    assert after.step_time == before.step_time


def test_without_a_step_time_the_interval_is_that_of_the_framework(fit):
    asked = {"model": "llama-3-8b", "cluster": "h100-sxm-80gb", "chips": 8, "global_batch": 64, "seq_len": 8192}
    settings = [setting_of_request(Request(**asked, profile=profile)) for profile in (fit.profile, BASE)]
    fitted, base = (interval_in(setting, plan_in(setting, Knobs(fsdp=8))) for setting in settings)
    assert (fitted.low, fitted.high) == (base.low, base.high)


def test_peaks_make_the_memory_of_an_unknown_framework_surer(tmp_path):
    known, unknown = (shipped_memory_uncertainties()[kind] for kind in (KNOWN, UNKNOWN))
    fit = perfmodel.fit_runs(peaks(load_profile("generic")), save=tmp_path / "mine.yaml")
    uncertainty = uncertainty_of_memory(fit.profile)
    assert known.scale < uncertainty.scale < unknown.scale
    assert known.centre < uncertainty.centre < unknown.centre
    assert "3 measured peaks of your own" in uncertainty.rests_on
    assert uncertainty_of_memory(load_profile(tmp_path / "mine.yaml")) == uncertainty


def test_tensors_alone_say_nothing_of_the_allocator():
    memory = perfmodel.fit_runs(peaks(load_profile(BASE), kind="allocated"), profile=BASE).memory
    assert memory.behaviour.determined == "still prior"
    assert memory.behaviour.value == memory.behaviour.prior
    assert memory.error_before == pytest.approx(0.0, abs=1e-3)
    assert {run.kind for run in memory.runs} == {"allocated"}


@pytest.mark.parametrize("name", LOGGED)
def test_a_log_gives_its_largest_peak(name, tmp_path):
    text, size = LOGGED[name]
    (tmp_path / "train.log").write_text(f"{text.replace('66.91', '60.00').replace('22560', '2000').replace('3000.00', '20.00')}\n{text}\n")
    (row,) = read_rows(tmp_path / "train.log").rows
    assert row.values["peak_memory"] == pytest.approx(size)


def test_deepspeed_logs_what_is_in_tensors(tmp_path):
    line = "epoch=0/micro_step=9/global_step=9, CurrSamplesPerSec=61.3, MemAllocated=6.01GB, MaxMemAllocated=19.52GB"
    (tmp_path / "train.log").write_text(line)
    (row,) = read_rows(tmp_path / "train.log").rows
    assert row.values["peak_allocated"] == pytest.approx(19.52 * 2**30)


@pytest.mark.parametrize(
    ("column", "value", "size"),
    [
        ("peak_memory", "42.8 GiB", 42.8 * 2**30),
        ("peak_memory_gib", "42.8", 42.8 * 2**30),
        ("max_memory_reserved", 45_000_000_000, 45e9),
        ("memory/max_memory_reserved(GiB)", 42.8, 42.8 * 2**30),
    ],
)
def test_a_peak_may_be_written_in_several_ways(column, value, size):
    run = {**JOB, **PLANS[0], column: value}
    (peak,) = perfmodel.fit_runs(run, profile=BASE).memory.runs
    assert peak.measured == pytest.approx(size)


def test_a_number_that_is_no_number_of_bytes_needs_its_unit():
    with pytest.raises(InputError, match=r"peak_memory=42\.8: needs its unit; write 42\.8 GiB, or name the column peak_memory_gib"):
        perfmodel.fit_runs({**JOB, **PLANS[0], "peak_memory": 42.8})


def test_a_snapshot_and_its_plan_are_a_run(tmp_path):
    plan = perfmodel.predict(model="llama-3-8b", cluster="h100-sxm-80gb", chips=8, global_batch=8, seq_len=8192, fsdp=8, profile=BASE).plan
    snapshot(tmp_path / "a.pickle", [block(1, 300 * MIB, FORWARD)], [])
    comparison = perfmodel.compare_memory(tmp_path / "a.pickle", plan, out=tmp_path / "runs.jsonl")
    (line,) = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert json.loads(line)["peak_memory"] == comparison.memories[0].most_reserved
    direct, written = (perfmodel.fit_runs(tmp_path / name, plan=given).memory for name, given in (("a.pickle", plan), ("runs.jsonl", None)))
    assert direct.runs[0].measured == written.runs[0].measured == comparison.memories[0].most_reserved
    assert direct.behaviour == written.behaviour


def test_runs_with_and_without_peaks_are_fitted_together(tmp_path):
    rows = peaks(load_profile(BASE))
    rows[0]["step_time"] = 3.0
    (tmp_path / "runs.jsonl").write_text(jsonl_text(rows))
    fit = perfmodel.fit_runs(tmp_path / "runs.jsonl", profile=BASE)
    assert (len(fit.runs), len(fit.memory.runs)) == (1, 3)
    assert (fit.profile.fitted.num_runs, fit.profile.fitted.num_memory_runs) == (1, 3)
    assert not math.isnan(fit.error_after)
