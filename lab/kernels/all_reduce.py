"""Small all-reduces by the kernels of serving engines: their tables, the fit to them, and its errors."""

from pathlib import Path

import numpy as np

from lab.kernels.held_out import size_decades, unseen_errors
from lab.kernels.tables import read_collectives, read_perf
from perfmodel.calibrate.fits import Array, CollectiveTable, bare_machine, fit_logarithm, relative_errors, rounded
from perfmodel.cost.serving.kernels import small_all_reduce_time
from perfmodel.foundation.collectives import CollectiveKind
from perfmodel.foundation.dtypes import Dtype
from perfmodel.hardware.cluster import Cluster
from perfmodel.hardware.serving_kernels import ONE_SHOT, TWO_SHOT, ServingKernels, SmallAllReduceModel

WORTH_IT = 0.9
"""Of NCCL's time: a message that takes more is taken to be NCCL's in these tables too, which hold what the library chose."""

MOST_BYTES = 2.0**24
"""Larger messages are NCCL's everywhere."""


def read_small_all_reduces(folder: Path, chip: str, version: str, nccl: str) -> CollectiveTable:
    """TensorRT-LLM's all-reduce in one node where its own kernels ran; sizes in the table count elements of bf16."""
    frame = read_perf(folder, chip, "comm", version, "custom_allreduce_perf")
    num_bytes, ranks = 2.0 * np.asarray(frame.message_size, dtype=float), np.asarray(frame.num_gpus, dtype=float)
    time = np.asarray(frame.latency, dtype=float) * 1e-3
    library = read_collectives(folder, chip, nccl, CollectiveKind.ALL_REDUCE)
    theirs: dict[tuple[float, float], list[float]] = {}
    for size, members, seconds in zip(library.num_bytes, library.ranks, library.time, strict=True):
        theirs.setdefault((float(size), float(members)), []).append(float(seconds))
    smallest = float(library.num_bytes.min())
    nccl_time = np.array(
        [np.median(theirs.get((max(size, smallest), members), [np.inf])) for size, members in zip(num_bytes, ranks, strict=True)]
    )
    table = CollectiveTable(num_bytes=num_bytes, ranks=ranks, ranks_per_node=ranks, time=time)
    return table.rows((time < WORTH_IT * nccl_time) & (num_bytes <= MOST_BYTES))


def predict_small_all_reduce(models: dict[str, SmallAllReduceModel], table: CollectiveTable, cluster: Cluster) -> Array:
    machine = bare_machine(cluster, Dtype.BF16, serving=ServingKernels(small_all_reduce=models))
    return np.asarray(small_all_reduce_time(table.num_bytes, table.ranks, machine))


def fit_small_all_reduce(table: CollectiveTable, cluster: Cluster) -> dict[str, SmallAllReduceModel]:
    """Both kernels at once: which ran is not said. A barrier with one more peer costs the same in both."""

    def models(x: Array) -> dict[str, SmallAllReduceModel]:
        peer_time = rounded(x[1] * 1e-6)
        return {
            ONE_SHOT: SmallAllReduceModel(base_time=rounded(x[0] * 1e-6), peer_time=peer_time, bandwidth_fraction=rounded(x[2])),
            TWO_SHOT: SmallAllReduceModel(base_time=rounded(x[3] * 1e-6), peer_time=peer_time, bandwidth_fraction=rounded(x[4])),
        }

    candidates = []
    for second_base in (8.0, 20.0):  # where the two kernels change places has several local optima
        found = fit_logarithm(
            lambda x: predict_small_all_reduce(models(x), table, cluster),
            table.time,
            start=(4, 0.1, 0.6, second_base, 0.6),
            lower=(0.1, 0, 0.05, 0.1, 0.05),
            upper=(50, 5, 1, 60, 1),
        )
        candidates.append(models(found))
    return min(candidates, key=lambda each: float(relative_errors(predict_small_all_reduce(each, table, cluster), table.time).mean()))


def small_all_reduce_errors(table: CollectiveTable, cluster: Cluster) -> Array:
    """Of every message, by a fit that saw none of its decade of sizes. [-]"""
    decades = size_decades(table)

    return unseen_errors(
        decades,
        table.time,
        table.rows,
        fit=lambda seen: fit_small_all_reduce(seen, cluster),
        predict=lambda models, unseen: predict_small_all_reduce(models, unseen, cluster),
        num_folds=len(np.unique(decades)),
    )
