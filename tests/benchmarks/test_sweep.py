"""Overhead of a sweep over the searches of its points: keys, parts, processes, the table. The tests assert a ratio, no time."""

import time

import pytest

import perfmodel

STUDY = {
    "version": 1,
    "fixed": {"seq_len": 1024, "ties": 0, "profile": "megatron", "tp": 1, "pp": 1},
    "axes": {
        "model": ["gpt2", "llama-3-8b"],
        "precision": ["bf16-mixed", "bf16"],
        "cluster": ["dgx-a100", "dgx-h100", "hgx-h200", "dgx-b200", "gb200-nvl72"],
        "chips": [4, 8],
        "global_batch": list(range(8, 208, 8)),
    },
}


@pytest.mark.parametrize(("jobs", "batches"), [(1, 5), (2, 25)])
def test_overhead_of_a_sweep(benchmark, tmp_path, jobs, batches):
    """200 searches in this process, and 1,000 in two others, whose start counts. Packages are loaded before."""
    if jobs > 1:
        pytest.importorskip("joblib")
    study = {**STUDY, "axes": {**STUDY["axes"], "global_batch": STUDY["axes"]["global_batch"][:batches]}}
    perfmodel.run_sweep({**study, "axes": {**study["axes"], "global_batch": [1]}}, out=tmp_path / "first.parquet", jobs=1)
    start = time.perf_counter()
    sweep = benchmark.pedantic(lambda: perfmodel.run_sweep(study, out=tmp_path / "a.parquet", jobs=jobs), rounds=1, iterations=1)
    overhead = (jobs * (time.perf_counter() - start) - sweep.work_time) / sweep.work_time
    benchmark.extra_info["searches"], benchmark.extra_info["overhead"] = sweep.num_computed, overhead
    assert sweep.num_computed == sweep.study.num_points == 40 * batches
    assert overhead < 0.05
