"""Small all-reduces of the engines: planted parameters come back; what NCCL ran is left out."""

import numpy as np
import pytest

from lab.kernels.all_reduce import fit_small_all_reduce, predict_small_all_reduce, read_small_all_reduces
from perfmodel.calibrate.fits import CollectiveTable
from perfmodel.hardware.reader import load_cluster
from perfmodel.hardware.serving_kernels import ONE_SHOT, TWO_SHOT, SmallAllReduceModel

H100 = load_cluster("dgx-h100", num_chips=16)
TRUE = {
    ONE_SHOT: SmallAllReduceModel(base_time=3e-6, peer_time=1e-7, bandwidth_fraction=0.65),
    TWO_SHOT: SmallAllReduceModel(base_time=9e-6, peer_time=1e-7, bandwidth_fraction=0.5),
}


def test_planted_parameters_come_back():
    num_bytes, ranks = (axis.ravel() for axis in np.meshgrid(2.0 ** np.arange(8, 24), [2.0, 4.0, 8.0]))
    table = CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=np.ones_like(ranks))
    table = CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=predict_small_all_reduce(TRUE, table, H100))
    found = fit_small_all_reduce(table, H100)
    for kernel, model in TRUE.items():
        assert found[kernel].base_time == pytest.approx(model.base_time, rel=0.03)
        assert found[kernel].bandwidth_fraction == pytest.approx(model.bandwidth_fraction, rel=0.03)


def test_a_published_table_is_read_without_what_nccl_ran(tmp_path):
    import pandas as pd

    ours, theirs = (tmp_path / "aiconfigurator" / "h100_sxm" / "comm" / name for name in ("trtllm/v", "nccl/n"))
    ours.mkdir(parents=True)
    theirs.mkdir(parents=True)
    pd.DataFrame({"num_gpus": 8, "message_size": [2**10, 2**20, 2**25], "latency": [0.004, 0.04, 0.2]}).to_parquet(
        ours / "custom_allreduce_perf.parquet"
    )
    pd.DataFrame(
        {"op_name": "all_reduce", "nccl_dtype": "half", "num_gpus": 8, "message_size": [2**12, 2**20], "latency": [0.01, 0.041]}
    ).to_parquet(theirs / "nccl_perf.parquet")
    table = read_small_all_reduces(tmp_path, "h100_sxm", "trtllm/v", "n")
    assert (table.num_bytes, table.time) == (pytest.approx([2048.0]), pytest.approx([4e-6]))
